"""What the ranks of a job do together.

`collectives` lets rank 0 decide and all hear the same, by a group that `own_group` makes for it;
`meeting` is what they say there, `dcp_errors` what they raise for an error of DCP. No other module
uses collectives. `rollcall` passes notes between ranks that cannot meet any more, `watchdog` tells
what does not return, `patience` gives up a storage that never comes back. `signal_handlers` notices
signals, `preemption` agrees on the step at which all ranks stop, `step_gate` holds the training
loop there.
"""
