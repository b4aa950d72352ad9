"""The tables, a module for each noun. Import them from here. A step stores only the tokens that it adds;
``shared_length < parent_length`` means a break. Arrays lie in tables of their own (``StepTokens``, ``RowTokens``) or in
a segment, a file that a ``TokenSegment`` names. So no list of rows or steps reads them."""

from rollouts.store.models.alarms import Alarm, AlarmRule, ProjectAlarms
from rollouts.store.models.chat_templates import ChatTemplate, ProjectTemplate, Tokenizer, template_name
from rollouts.store.models.codes import ALPHABET, code_of_number, new_code
from rollouts.store.models.comments import Comment, Seen
from rollouts.store.models.findings import MutedKind, StoredFinding
from rollouts.store.models.forks import Fork
from rollouts.store.models.jobs import Job
from rollouts.store.models.people import (
    DEFAULT_PROJECT, ApiToken, AuditEvent, ExternalIdentity, Invitation, LoginSession, Membership, Project, Role,
    ShareLink, default_project
)
from rollouts.store.models.replays import Replay, ReplayRows, Retokenized
from rollouts.store.models.rows import RowColumn, RowTokens, StoredRow
from rollouts.store.models.runs import Rejection, Run, RunFigures, RunTag
from rollouts.store.models.scored_columns import RowScores, ScoredColumn, TrajectoryDamage
from rollouts.store.models.steps import StepTokens, StoredStep
from rollouts.store.models.template_checks import ParserAudit, TemplateCheck
from rollouts.store.models.token_segments import Content, TokenSegment
from rollouts.store.models.training_steps import PolicyVersionFigures, PushedFigures, TrainingStepFigures
from rollouts.store.models.trajectories import StoredTrajectory
from rollouts.store.models.work_status import ACTIVE, WorkStatus
