"""The default scheduler: `due`, `lineup`, `cut` and `allowance` are its rules, `deferring` carries them out."""

from tenuto.batching.core.deferred.deferring import DeferredOptions, DeferredScheduler

__all__ = ["DeferredOptions", "DeferredScheduler"]
