"""Request life cycle: input processing, the step loop, detokenizing, stop strings, outputs."""
