"""Measuring how far honest settings spread and how far cheats lie from them, and limits between the two."""
