"""
The stages of a policy.

- `split`: a stage is the whole model without the modules of other stages; which models can be split.
- `view`: a stage of a policy that stays whole.
- `weights`: a policy of which every rank has its stages alone: loaded, aligned, streamed.
- `replica`: the whole policy on every rank, assembled from the stages.
- `gradients`: from the last backward of a step to the optimizer.
- `shared_optimizer`: the state of an optimizer, shared by the ranks that hold a stage.
- `checkpoint`: policy and optimizer on disk, a file per stage.
"""
