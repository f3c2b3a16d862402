"""The links of the pair pass: per loss the few lines that differ, as device functions the pass is compiled with."""
