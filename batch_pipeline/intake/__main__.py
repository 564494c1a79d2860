"""A process that checks lines for another one; see `checkers`. Not for people."""

import sys

from batch_pipeline.intake.checkers import serve

serve(sys.stdin.buffer, sys.stdout.buffer)
