"""What a layout will cost before any GPU is asked: memory, collectives and time at every expert-parallel degree."""

from nemotron_nano.planner._collectives import Collective as Collective
from nemotron_nano.planner._inputs import Hardware as Hardware
from nemotron_nano.planner._inputs import PlanError as PlanError
from nemotron_nano.planner._inputs import parse_bytes as parse_bytes
from nemotron_nano.planner._memory import Memory as Memory
from nemotron_nano.planner._predict import Plan as Plan
from nemotron_nano.planner._predict import Prediction as Prediction
from nemotron_nano.planner._predict import plan as plan
from nemotron_nano.planner._show import plot as plot
from nemotron_nano.planner._show import show as show
from nemotron_nano.planner._show import to_json as to_json
