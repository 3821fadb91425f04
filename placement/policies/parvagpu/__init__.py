"""ParvaGPU: MIG instances with equal processes of one model."""
