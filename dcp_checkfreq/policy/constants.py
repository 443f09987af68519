"""The tuning constants of all rules, each with its reason. docs/policy.md says what they do."""

# Iterations that are measured before the first save. CheckFreq, section 4, "Checkpointing policy":
# 1 % of the epoch or 50 iterations, the fewer.
PROFILE_STEPS = 50
# But not fewer than these. The first few iterations of a job warm up allocator, kernels and data
# workers. A median of ten is still right when four of them are far too slow; of fewer it soon is
# not.
FEWEST_PROFILE_STEPS = 10
# Two of the last three must agree that something changes: one outlier never does it. A median of
# three iterations survives one slow one.
FEW = 3
# How much five saves differ is known: of fewer it is a guess.
SOME = 5
# Saves that are looked back at: costs are averaged over them, and what swings comes back in them.
KEPT = 16
# An iteration without a save is looked for at least this often: it costs lost work in a crash.
GAP_EVERY_SAVES = 8
# Standard errors of a cost that are not acted on: 1 of 40 is more by chance.
SURE = 2.0
# Standard errors by which something has changed, after which what was measured before is dropped.
CHANGED = 4.0
# An interval begins to shrink when even costs this much higher would need less, so that steady
# costs between both bounds never make it swing.
CLEARLY = 1.25
# Saves, ranks and copies that differ by no more than this share are alike.
ALIKE = 0.1
# Standard deviation of an iteration, as a share, until iterations were compared with each other.
USUAL_NOISE = 0.02
