"""The tables, a module for each noun. Import them from here.

A step stores only the tokens that it adds; ``shared_length < parent_length`` means a break.
Arrays lie in tables of their own (``StepTokens``, ``RowTokens``) or in a segment, a file that a ``TokenSegment`` names.
So no list of rows or steps reads them.
"""

from rollouts.models.alarms import Alarm, AlarmRule, ProjectAlarms
from rollouts.models.chat_templates import ChatTemplate, ProjectTemplate, template_name
from rollouts.models.codes import ALPHABET, code_of_number, new_code
from rollouts.models.comments import Comment
from rollouts.models.contents import Content
from rollouts.models.findings import StoredFinding
from rollouts.models.jobs import Job
from rollouts.models.muted import MutedKind
from rollouts.models.parser_audits import ParserAudit
from rollouts.models.people import (
    DEFAULT_PROJECT,
    ApiToken,
    AuditEvent,
    ExternalIdentity,
    Invitation,
    LoginSession,
    Membership,
    Project,
    Role,
    ShareLink,
    default_project,
)
from rollouts.models.replays import Replay, ReplayRows
from rollouts.models.retokenized import Retokenized
from rollouts.models.rows import RowColumn, RowTokens, StoredRow
from rollouts.models.runs import Rejection, Run, RunFigures, RunTag
from rollouts.models.scored_columns import RowScores, ScoredColumn
from rollouts.models.seen import Seen
from rollouts.models.steps import StepTokens, StoredStep
from rollouts.models.template_checks import TemplateCheck
from rollouts.models.token_segments import TokenSegment
from rollouts.models.tokenizers import Tokenizer
from rollouts.models.training_steps import PolicyVersionFigures, PushedFigures, TrainingStepFigures
from rollouts.models.trajectories import StoredTrajectory
from rollouts.models.work_status import ACTIVE, WorkStatus

__all__ = [
    "ACTIVE",
    "ALPHABET",
    "DEFAULT_PROJECT",
    "Alarm",
    "AlarmRule",
    "ApiToken",
    "AuditEvent",
    "ChatTemplate",
    "Comment",
    "Content",
    "ExternalIdentity",
    "Invitation",
    "Job",
    "LoginSession",
    "Membership",
    "MutedKind",
    "ParserAudit",
    "PolicyVersionFigures",
    "Project",
    "ProjectAlarms",
    "ProjectTemplate",
    "Rejection",
    "Replay",
    "ReplayRows",
    "Retokenized",
    "Role",
    "RowColumn",
    "RowScores",
    "RowTokens",
    "Run",
    "RunFigures",
    "RunTag",
    "ScoredColumn",
    "Seen",
    "ShareLink",
    "StepTokens",
    "StoredFinding",
    "StoredRow",
    "StoredStep",
    "StoredTrajectory",
    "TemplateCheck",
    "TokenSegment",
    "Tokenizer",
    "TrainingStepFigures",
    "WorkStatus",
    "code_of_number",
    "default_project",
    "new_code",
    "template_name",
]
