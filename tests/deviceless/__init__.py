"""Tests that compile for chips this machine does not have, with those chips' own compilers."""
