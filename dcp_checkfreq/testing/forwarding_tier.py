"""`ForwardingTier`, the base of the faulty ones."""

from dcp_checkfreq.storage.forwarding import ForwardingReservation, ForwardingTier, Result, Verb

__all__ = ["ForwardingReservation", "ForwardingTier", "Result", "Verb"]
