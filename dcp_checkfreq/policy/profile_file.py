"""What a job learned about its saves, kept next to its checkpoints for the next start."""

from __future__ import annotations

import logging

from dcp_checkfreq.format.checked_json import LONGEST_TEXT
from dcp_checkfreq.format.names import RUN_FOLDER, new_attempt, profile_file
from dcp_checkfreq.policy.stored_profile import StoredProfile, decode, encode
from dcp_checkfreq.storage.tier import Tier, read_small

_log = logging.getLogger(__name__)


class ProfileFiles:
    """The stored profiles in a root, one file per job. Used by rank 0 only.

    Losing one costs a new profile and nothing else, so trouble with them is logged, not raised.
    """

    def __init__(self, root: Tier) -> None:
        self._folder = root.child(RUN_FOLDER)

    def load(self, fingerprint: str) -> StoredProfile | None:
        """Return the profile of the job with this fingerprint; None if there is no good one."""
        name = profile_file(fingerprint)
        try:
            content = read_small(self._folder, name, at_most_bytes=LONGEST_TEXT)
            profile = decode(content.decode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = f"{name} is not used, this run profiles anew: {error}"
            _log.warning("%s/%s", self._folder.location, why)
            return None
        return profile if profile.fingerprint == fingerprint else None

    def store(self, profile: StoredProfile) -> None:
        """Keep the profile for the next start."""
        name = profile_file(profile.fingerprint)
        try:
            self._folder.make()
            self._folder.replace(name, encode(profile).encode(), scratch=f"{name}.{new_attempt()}")
        except OSError as error:
            _log.warning("%s/%s was not written: %s", self._folder.location, name, error)
