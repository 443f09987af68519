"""All ranks copy their shards to the remote side; when the last one is done, rank 0 publishes."""

from __future__ import annotations

from collections.abc import Callable

from dcp_checkfreq.errors import CheckFreqError, WriteFailed
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.staging.staged_tier import Upload

# Nobody waits in a collective for an upload: it may be still for longer than ranks wait for others.
_GIVE_UP_AFTER_S = 600.0
_ROUND_S = 30.0  # ranks hear of each other at least so often while some are still copying


def upload_and_publish(
    ranks: Ranks,
    upload: Upload,
    where: str,
    publish: Callable[[], None],
    *,
    each_round: Callable[[], None],
) -> None:
    """Wait for the uploads of all ranks, and publish. All ranks call it.

    The ranks meet in rounds, so an upload may take longer than a rank waits for another one in a
    collective; the error of any rank stops the uploads of all.

    Args:
        ranks: of this job; nothing else uses its group meanwhile.
        upload: of this rank. It is closed.
        where: the checkpoint, for errors.
        publish: called on rank 0 when all uploads are complete.
        each_round: called on rank 0 while they are not; must not raise.

    Raises:
        WriteFailed: an upload failed, or came to a stand, on all ranks. Nothing was published.
        SaveFailed, PublishUnknown: of ``publish``, on all ranks.
        RankLost: a rank did not answer.
    """

    def rule(are_done: list[bool]) -> bool:
        if all(are_done):
            with ranks.asking("publishing", where):
                publish()
            return True
        with ranks.asking("renewing the lease", where):
            each_round()
        return False

    round_s = min(_ROUND_S, ranks.timeout_s / 4)

    def look() -> bool:
        if not upload.wait(round_s):
            still_s = upload.still_for(round_s)
            if still_s >= max(ranks.timeout_s, _GIVE_UP_AFTER_S):
                upload.give_up()
                at = f"rank {ranks.rank} has been uploading, without a sign for {still_s:.0f} s"
                raise WriteFailed(where, f"the storage does not come back: {at}")
            return False
        problem = upload.problem()
        if problem is None:
            return True
        if isinstance(problem, CheckFreqError):
            raise problem
        raise WriteFailed(where, f"rank {ranks.rank}, while uploading: {problem}") from problem

    try:
        with ranks.doing("uploading", where):
            while not ranks.combine("uploading", look, rule):
                pass
    finally:
        upload.close()
