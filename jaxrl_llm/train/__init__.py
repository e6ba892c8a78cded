"""Layer 4: training runs. State, step, loop, mesh, checkpoints, metrics, held-out evaluation."""

from jaxrl_llm.core.runtime.locks import InUseError
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora, merge_lora
from jaxrl_llm.models.peft import save_adapter
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.batches import pack_batch
from jaxrl_llm.train.checkpoint import CheckpointError, Checkpoints, restore, save
from jaxrl_llm.train.config import (
    AsyncConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ReportConfig,
    SamplingConfig,
    SubagentConfig,
    TrainConfig,
)
from jaxrl_llm.train.evaluation.at_k import AtK, bootstrap, majority_at_k, pass_at_k
from jaxrl_llm.train.evaluation.evaluate import Accuracy, accuracy, evaluate
from jaxrl_llm.train.evaluation.intervals import wilson
from jaxrl_llm.train.evolution import make_evolution_step, make_population
from jaxrl_llm.train.logging.report import write_report
from jaxrl_llm.train.logging.run_folder import OccupiedError, TrainingError
from jaxrl_llm.train.logging.sinks import RunInfo, Sink
from jaxrl_llm.train.loop import Result, train
from jaxrl_llm.train.mesh import DistributedConfig, MeshConfig, make_mesh
from jaxrl_llm.train.models.critic import CriticState, critic_values, init_critic
from jaxrl_llm.train.models.denoising import DenoisingScorer, draw_masks
from jaxrl_llm.train.models.flows import FlowScorer, draw_noise
from jaxrl_llm.train.models.model_rewards import judge, reward_model
from jaxrl_llm.train.models.score import Scorer, score
from jaxrl_llm.train.models.score_norms import score_sq_norms
from jaxrl_llm.train.models.teachers import (
    AlignedTeacher,
    ModelTeacher,
    ServerTeacher,
    StoredTeacher,
    TokenScores,
    TokenTeacher,
    write_scores,
)
from jaxrl_llm.train.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.train.policy_gradient import (
    StepOptions,
    apply_gradients,
    make_gradients,
    make_pieces,
    make_scorer,
    make_step,
)
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.init import init_state
from jaxrl_llm.train.update.part import Gradients
from jaxrl_llm.train.update.pieces import StepPieces
from jaxrl_llm.train.update.score_batch import apply_rules, score_batch, score_visits

__all__ = [
    "Accuracy",
    "Adapted",
    "Algorithm",
    "AlignedTeacher",
    "AsyncConfig",
    "AtK",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpoints",
    "CriticState",
    "DataConfig",
    "DenoisingScorer",
    "DistributedConfig",
    "EvaluationConfig",
    "FlowScorer",
    "Gradients",
    "InUseError",
    "LoRAConfig",
    "MeshConfig",
    "ModelTeacher",
    "OccupiedError",
    "OptimizerConfig",
    "ReportConfig",
    "Result",
    "RunInfo",
    "SamplingConfig",
    "Scorer",
    "ServerTeacher",
    "Sink",
    "StepOptions",
    "StepPieces",
    "StoredTeacher",
    "SubagentConfig",
    "TokenScores",
    "TokenTeacher",
    "TrainConfig",
    "TrainState",
    "TrainingError",
    "accuracy",
    "adapted_model",
    "apply_gradients",
    "apply_rules",
    "bootstrap",
    "critic_values",
    "draw_masks",
    "draw_noise",
    "evaluate",
    "init_critic",
    "init_lora",
    "init_state",
    "judge",
    "majority_at_k",
    "make_evolution_step",
    "make_gradients",
    "make_mesh",
    "make_optimizer",
    "make_pieces",
    "make_population",
    "make_scorer",
    "make_step",
    "merge_lora",
    "pack_batch",
    "pass_at_k",
    "restore",
    "reward_model",
    "save",
    "save_adapter",
    "score",
    "score_batch",
    "score_sq_norms",
    "score_visits",
    "train",
    "wilson",
    "write_report",
    "write_scores",
]
