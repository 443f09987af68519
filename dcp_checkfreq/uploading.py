"""All ranks copy their shards to the slow side; when the last one is done, rank 0 publishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.errors import CheckFreqError, WriteFailed
from dcp_checkfreq.storage.staged import Upload

_ROUND_S = 30.0  # ranks hear of each other at least so often while some are still copying


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says in a round."""

    is_done: bool
    error: CheckFreqError | None


def upload_and_publish(
    agree: Agreement,
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
        agree: of the ranks; nothing else uses its group meanwhile.
        upload: of this rank. It is closed.
        where: the checkpoint, for errors.
        publish: called on rank 0 when all uploads are complete.
        each_round: called on rank 0 while they are not; must not raise.

    Raises:
        WriteFailed: an upload failed, on all ranks. Nothing was published.
        SaveFailed, PublishUnknown: of ``publish``, on all ranks.
        RankLost: a rank did not answer.
    """

    def rule(ranks: list[_Said]) -> bool:
        for said in ranks:
            if said.error is not None:
                raise said.error
        if all(said.is_done for said in ranks):
            publish()
            return True
        each_round()
        return False

    def say() -> _Said:
        if not upload.wait(min(_ROUND_S, agree.timeout_s / 4)):
            return _Said(False, None)
        problem = upload.problem()
        if problem is None:
            return _Said(True, None)
        if isinstance(problem, CheckFreqError):
            return _Said(True, problem)
        return _Said(True, WriteFailed(where, f"rank {agree.rank}, while uploading: {problem}"))

    try:
        while not agree.consult(say(), rule):
            pass
    finally:
        upload.close()
