"""Kernel backends behind one interface; ``load_kernels`` chooses one."""
