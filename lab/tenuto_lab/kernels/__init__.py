"""What models cost, learnt from single kernels: operators timed where they run, our method and USHER's as published."""
