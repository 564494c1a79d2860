"""Intake: what lies between an upload and the chunks that workers lease: check every line, order, cut, record."""
