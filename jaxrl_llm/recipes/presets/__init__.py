"""One preset a paper: a function of a method's own options that returns a Recipe."""

from jaxrl_llm.recipes.presets.ace import ace
from jaxrl_llm.recipes.presets.adaptive_kl import adaptive_kl
from jaxrl_llm.recipes.presets.ampo import ampo
from jaxrl_llm.recipes.presets.areal import areal
from jaxrl_llm.recipes.presets.brorl import brorl
from jaxrl_llm.recipes.presets.capo import capo
from jaxrl_llm.recipes.presets.cispo import cispo
from jaxrl_llm.recipes.presets.clip_cov import clip_cov
from jaxrl_llm.recipes.presets.d3s import d3s
from jaxrl_llm.recipes.presets.dapo import dapo
from jaxrl_llm.recipes.presets.dars import dars
from jaxrl_llm.recipes.presets.dcpo_distribution import dcpo_distribution
from jaxrl_llm.recipes.presets.dcpo_dynamic_clip import dcpo_dynamic_clip
from jaxrl_llm.recipes.presets.dispo import dispo
from jaxrl_llm.recipes.presets.dr_grpo import dr_grpo
from jaxrl_llm.recipes.presets.drpo_len import drpo_len
from jaxrl_llm.recipes.presets.fapo import fapo
from jaxrl_llm.recipes.presets.gbpo import gbpo
from jaxrl_llm.recipes.presets.gdpo import gdpo
from jaxrl_llm.recipes.presets.gmpo import gmpo
from jaxrl_llm.recipes.presets.gpg import gpg
from jaxrl_llm.recipes.presets.grpo import grpo
from jaxrl_llm.recipes.presets.grpo_passk import grpo_passk
from jaxrl_llm.recipes.presets.gspo import gspo
from jaxrl_llm.recipes.presets.hbpo import hbpo
from jaxrl_llm.recipes.presets.icepop import icepop
from jaxrl_llm.recipes.presets.icpo import icpo
from jaxrl_llm.recipes.presets.jspo import jspo
from jaxrl_llm.recipes.presets.kl_cov import kl_cov
from jaxrl_llm.recipes.presets.llds import llds
from jaxrl_llm.recipes.presets.luffy_shaping import luffy_shaping
from jaxrl_llm.recipes.presets.luspo import luspo
from jaxrl_llm.recipes.presets.maxrl import maxrl
from jaxrl_llm.recipes.presets.mc_grpo import mc_grpo
from jaxrl_llm.recipes.presets.minpro import minpro
from jaxrl_llm.recipes.presets.mssr import mssr
from jaxrl_llm.recipes.presets.opo import opo
from jaxrl_llm.recipes.presets.otb import otb
from jaxrl_llm.recipes.presets.otr import otr
from jaxrl_llm.recipes.presets.passk_training import passk_training
from jaxrl_llm.recipes.presets.pkpo import pkpo
from jaxrl_llm.recipes.presets.ppo_max import ppo_max
from jaxrl_llm.recipes.presets.ps_grpo import ps_grpo
from jaxrl_llm.recipes.presets.reinforce_pp import reinforce_pp
from jaxrl_llm.recipes.presets.reinforce_pp_baseline import reinforce_pp_baseline
from jaxrl_llm.recipes.presets.remax import remax
from jaxrl_llm.recipes.presets.remix import remix
from jaxrl_llm.recipes.presets.rloo import rloo
from jaxrl_llm.recipes.presets.rollout_correction import rollout_correction
from jaxrl_llm.recipes.presets.rover import rover
from jaxrl_llm.recipes.presets.safe import safe
from jaxrl_llm.recipes.presets.sapo import sapo
from jaxrl_llm.recipes.presets.sdpo import sdpo
from jaxrl_llm.recipes.presets.spo_tracker import spo_tracker
from jaxrl_llm.recipes.presets.srpo import srpo
from jaxrl_llm.recipes.presets.trloo import trloo
from jaxrl_llm.recipes.presets.ulorl import ulorl
from jaxrl_llm.recipes.presets.v05_baseline import v05_baseline
from jaxrl_llm.recipes.presets.vcpo import vcpo
from jaxrl_llm.recipes.presets.verpo import verpo
from jaxrl_llm.recipes.presets.vespo import vespo
from jaxrl_llm.recipes.presets.xrpo import xrpo

__all__ = [
    "ace",
    "adaptive_kl",
    "ampo",
    "areal",
    "brorl",
    "capo",
    "cispo",
    "clip_cov",
    "d3s",
    "dapo",
    "dars",
    "dcpo_distribution",
    "dcpo_dynamic_clip",
    "dispo",
    "dr_grpo",
    "drpo_len",
    "fapo",
    "gbpo",
    "gdpo",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "gspo",
    "hbpo",
    "icepop",
    "icpo",
    "jspo",
    "kl_cov",
    "llds",
    "luffy_shaping",
    "luspo",
    "maxrl",
    "mc_grpo",
    "minpro",
    "mssr",
    "opo",
    "otb",
    "otr",
    "passk_training",
    "pkpo",
    "ppo_max",
    "ps_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "remix",
    "rloo",
    "rollout_correction",
    "rover",
    "safe",
    "sapo",
    "sdpo",
    "spo_tracker",
    "srpo",
    "trloo",
    "ulorl",
    "v05_baseline",
    "vcpo",
    "verpo",
    "vespo",
    "xrpo",
]
