"""Interference models: how much slower a gpu-let is because of its neighbours on the same GPU."""

from tenuto.placement.interference.interference_model import InterferenceModel, NoInterference, Resident

__all__ = ["InterferenceModel", "NoInterference", "Resident"]
