"""What a training script registers, as a state for DCP and back.

`app_state` holds the parts of a job, `part` is what all kinds of them have in common, `per_rank`
marks what each rank keeps for itself. `module_part`, `optimizer_part` and `value_part` each save
one kind of part; `fsdp1_part` asks torch to do it. `names` says what a tensor is called, `storable`
what could not be saved or restored, `prepared` knows loaders that another library has wrapped.

Restoring: `saved` is what a checkpoint holds, `wanted` what is loaded from it, `tree` nests it,
`differences` is what does not fit, and `restoration` puts all parts in place or none. `module_fill`
and `optimizer_fill` restore one part. `torch_load` repairs what torch's `load_state_dict` does to
an optimizer's state, `held_optimizers` finds optimizers inside of others.

Unusual tensors: `wrappers` takes wrapper subclasses apart into their inner tensors,
`wrapper_record` says what they were wrapped in, `wrapper_fill` restores one in its place, and
`wrapper_kinds` makes one where there is none. `sharded_state` is optimizer state of another shape
than its parameter. `module_tensors` are those of a module that need more than being copied into,
and `odd_fill` restores those without elements in order.

Values: `packed` keeps them as they are, in tags for what a closed unpickler does not make, and
`unpacked` makes them again: `tags`, `value_kinds`, `user_classes`, `generators`, `tensor_kinds`.

Between ranks: `value_digests` are the same wherever a value is, `replica_paths` names what differs.
"""
