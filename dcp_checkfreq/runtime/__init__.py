"""What one Python process needs, whatever it saves: knows no rank, storage or tensor.

`clock` reads the time, and is the only module that does; `marks` are moments of a training loop.
`crew` has threads that help with work, `one_call` refuses a second call of an object, `options`
says what each public option may be, `outcome` is how work ended that must reach its end,
`process_end` finishes it before the process does, `error_reports` makes plain data of errors.
`process_setting` counts who needs a setting of the whole process changed: `gc_paused` and
`gil_switch_interval` are such settings. `flock` holds files, `version` is the version that is
written into checkpoints.
"""
