"""Published experiments, run again: the evaluation of Elvinger's thesis in virtual time or on emulated GPUs."""
