"""Expert parallelism: routing, dispatch and combine, experts, the MoE layer, checkpoints."""
