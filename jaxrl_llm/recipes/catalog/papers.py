"""The papers that this library covers, one row per paper, with their methods."""

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper and its methods in this library.

    Attributes:
      title: Published title.
      arxiv: arXiv id.
      keys: Its methods, by their keys in the catalog.
      idea: Its main idea, if it has no method here.
      page: The page of docs/ that describes it, if it has no method here; "" for none yet.
    """

    title: str
    arxiv: str
    keys: tuple[str, ...] = ()
    idea: str = ""
    page: str = ""


# fmt: off
PAPERS = (
    Paper("SALT: Step-level Advantage Assignment for Long-horizon Agents via Trajectory Graph",
        "2510.20022", ("salt",)),
    Paper("Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework for "
        "Efficient Policy Optimization", "2509.22115", ("d3s",)),
    Paper("BranchGRPO: Stable and Efficient GRPO with Structured Branching in Diffusion "
        "Models", "2509.06040", ("branch_grpo",)),
    Paper("ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning",
        "2512.13095", ("adhint",)),
    Paper("XRPO: Pushing the limits of GRPO with Targeted Exploration and Exploitation",
        "2510.06672", ("xrpo",)),
    Paper("Depth-Breadth Synergy in RLVR: Unlocking LLM Reasoning Gains with Adaptive "
        "Exploration", "2508.13755", ("dars",)),
    Paper("APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail "
        "Generation", "2509.18521", ("april",)),
    Paper("BroRL: Scaling Reinforcement Learning via Broadened Exploration",
        "2510.01180", ("brorl",)),
    Paper("V_0: A Generalist Value Model for Any Policy at State Zero",
        "2602.03584", ("v0_budget",)),
    Paper("AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language "
        "Reasoning", "2505.24298", ("areal",)),
    Paper("Group-in-Group Policy Optimization for LLM Agent Training", "2505.10978", ("gigpo",)),
    Paper("UI-S1: Advancing GUI Automation via Semi-online Reinforcement Learning",
        "2509.11543", ("ui_s1",)),
    Paper("VADE: Variance-Aware Dynamic Sampling via Online Sample-Level Difficulty "
        "Estimation for Multimodal RL", "2511.18902", ("vade",)),
    Paper("Efficient Multi-turn RL for GUI Agents via Decoupled Training and Adaptive Data "
        "Curation", "2509.23866", ("dart",)),
    Paper("Segment Policy Optimization: Effective Segment-Level Credit Assignment in RL for"
        " Large Language Models", "2505.23564", ("spo_chain", "spo_tree")),
    Paper("DRPO: Efficient Reasoning via Decoupled Reward Policy Optimization",
        "2510.04474", ("drpo_len",)),
    Paper("GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward "
        "RL Optimization", "2601.05242", ("gdpo",)),
    Paper("FAPO: Flawed-Aware Policy Optimization for Efficient and Reliable Reasoning",
        "2510.22543", ("fapo",)),
    Paper("Sharing is Caring: Efficient LM Post-Training with Collective RL Experience "
        "Sharing", "2509.08721", ("sapo_swarm",)),
    Paper("Meta-Awareness Enhances Reasoning Models: Self-Alignment Reinforcement Learning",
        "2510.03259", ("masa",)),
    Paper("rStar2-Agent: Agentic Reasoning Technical Report", "2508.20722", ("grpo_roc",)),
    Paper("Group Distributionally Robust Optimization-Driven Reinforcement Learning for LLM"
        " Reasoning", "2601.19280", ("prompt_gdro", "rollout_gdro")),
    Paper("Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning",
        "2410.08146", ("pav",)),
    Paper("Online Process Reward Leanring for Agentic Reinforcement Learning",
        "2509.19199", ("oprl",)),
    Paper("Nudging the Boundaries of LLM Reasoning", "2509.25666", ("nurl",)),
    Paper("ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for "
        "Aligning Large Language Models", "2310.10505", ("remax",)),
    Paper("Jet-RL: Enabling On-Policy FP8 Reinforcement Learning with Unified Training and "
        "Rollout Precision Flow", "2601.14243", ("jet_rl",)),
    Paper("One-Token Rollout: Guiding Supervised Fine-Tuning of LLMs with Policy Gradient",
        "2509.26313", ("otr",)),
    Paper("ETTRL: Balancing Exploration and Exploitation in LLM Test-Time Reinforcement "
        "Learning Via Entropy Mechanism", "2508.11356", ("ettrl", "ttrl_majority")),
    Paper("Lookahead Tree-Based Rollouts for Enhanced Trajectory-Level Exploration in "
        "Reinforcement Learning with Verifiable Rewards", "2510.24302", ("latr",)),
    Paper("Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM "
        "Reasoning in RLVR", "2509.23808", ("verl_erank",)),
    Paper("Self-Hinting Language Models Enhance Reinforcement Learning", "2602.03143", ("sage",)),
    Paper("SPARK: Synergistic Policy And Reward Co-Evolving Framework", "2509.22624", ("spark",)),
    Paper("VeRPO: Verifiable Dense Reward Policy Optimization for Code Generation",
        "2601.03525", ("verpo",)),
    Paper("Hierarchical Budget Policy Optimization for Adaptive Reasoning",
        "2507.15844", ("hbpo",)),
    Paper("Polychromic Objectives for Reinforcement Learning", "2509.25424", ("polychromic",)),
    Paper("Reuse your FLOPs: Scaling RL on Hard Problems by Conditioning on Very Off-Policy"
        " Prefixes", "2601.18795", ("prefix_rl",)),
    Paper("Skywork R1V2: Multimodal Hybrid Reinforcement Learning for Reasoning",
        "2504.16656", ("ssb", "mpo")),
    Paper("Symphony: A Heuristic Normalized Calibrated Advantage Actor and Critic Algorithm"
        " in application for Humanoid Robots", "2512.10477", ("fading_replay",)),
    Paper("From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's "
        "Nature", "2509.16591", ("hapo",)),
    Paper("Squeeze the Soaked Sponge: Efficient Off-policy Reinforcement Finetuning for "
        "Large Language Model", "2507.06892", ("remix",)),
    Paper("Stabilizing Long-term Multi-turn Reinforcement Learning with Gated Rewards",
        "2508.10548", ("gated_reward",)),
    Paper("Evolution Strategies at the Hyperscale",
        "2511.16652", ("eggroll_forward", "es_fitness", "eggroll_update", "eggroll_variants",
        "es_llm_loop", "egg_int8", "es_int8_adam", "open_es")),
    Paper("Truncated Proximal Policy Optimization", "2506.15050", ("t_ppo",)),
    Paper("SeeUPO: Sequence-Level Agentic-RL with Convergence Guarantees",
        "2602.06554", ("seeupo",)),
    Paper("Past-Future Scheduler for LLM Serving under SLA Guarantees",
        "2507.10150", ("past_future",)),
    Paper("UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large "
        "Language Models' Reasoning Abilities", "2507.19766", ("ulorl",)),
    Paper("Dr. Kernel: Reinforcement Learning Done Right for Triton Kernel Generations",
        "2602.05885", ("trloo",)),
    Paper("Efficient RLVR Training via Weighted Mutual Information Data Selection",
        "2603.01907", ("insight",)),
    Paper("Information Gain-based Policy Optimization: A Simple and Effective Approach for "
        "Multi-Turn LLM Agents", "2510.14967", ("igpo",)),
    Paper("MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout "
        "Reinforcement Learning", "2601.22582", ("mc_grpo",)),
    Paper("FP4 Explore, BF16 Train: Diffusion Reinforcement Learning via Efficient Rollout "
        "Scaling", "2604.06916", ("sol_rl", "sol_rl_flow")),
    Paper("DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
        "2509.16117", ("diffusion_nft",)),
    Paper("Stable and Efficient Single-Rollout RL for Multimodal Reasoning",
        "2512.18215", ("mssr",)),
    Paper("Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-"
        "targeted Online Data Selection and Rollout Replay",
        "2506.05316", ("dots", "rollout_replay")),
    Paper("UniGRPO: Unified Policy Optimization for Reasoning-Driven Visual Generation",
        "2603.23500", ("unigrpo", "flow_grpo")),
    Paper("Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks",
        "2602.22817", ("hgpo",)),
    Paper("Multi-Agent Deep Research: Training Multi-Agent Systems with M-GRPO",
        "2511.13288", ("m_grpo",)),
    Paper("DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models",
        "2406.10707", idea="Saves in the background while training goes on, by Orbax",
        page="docs/training.md"),
    Paper("RollArt: Scaling Agentic RL Training via Disaggregated Infrastructure",
        "2512.22560", ("roll_async",)),
    Paper("Universal Checkpointing: Efficient and Flexible Checkpointing for Large Scale "
        "Distributed Training",
        "2406.18820", idea="A checkpoint restores on any mesh", page="docs/pods.md"),
    Paper("A Systematic Study of In-the-Wild Model Merging for Large Language Models",
        "2511.21437", ("merge",)),
    Paper("Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", "2602.17616", ("vcpo",)),
    Paper("Prune as You Generate: Online Rollout Pruning for Faster and Better RLVR",
        "2603.24840", ("arrol",)),
    Paper("A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
        "2601.22718", ("minpro",)),
    Paper("Recycling Failures: Salvaging Exploration in RLVR via Fine-Grained Off-Policy "
        "Guidance", "2602.24110", ("scope",)),
    Paper("Preventing Learning Stagnation in PPO by Scaling to 1 Million Parallel "
        "Environments", "2603.06009", idea="More rollouts or smaller steps against plateaus",
        page="docs/scaling.md"),
    Paper("Parameter-Efficient Checkpoint Merging via Metrics-Weighted Averaging",
        "2504.18580", ("mwa",)),
    Paper("Overconfident Errors Need Stronger Correction: Asymmetric Confidence Penalties "
        "for Reinforcement Learning", "2602.21420", ("ace",)),
    Paper("MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for agentic "
        "tool use", "2508.18669", ("mua_rl",)),
    Paper("Improving Consistency in Retrieval-Augmented Systems with Group Similarity Rewards",
        "2510.04392", ("ps_grpo",)),
    Paper("V_0.5: Generalist Value Model as a Prior for Sparse RL Rollouts",
        "2603.10848", ("v05_baseline",)),
    Paper("ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model "
        "Development",
        "2407.20143", idea="A format without parallelism, and what a save costs a step",
        page="docs/training.md"),
    Paper("Cog-Rethinker: Hierarchical Metacognitive Reinforcement Learning for LLM Reasoning",
        "2510.15979", ("cog_rethinker",)),
    Paper("PORTool: Tool-Use LLM Training with Rewarded Tree", "2510.26020", ("portool",)),
    Paper("Learning Strategic Language Agents in the Werewolf Game with Iterative Latent "
        "Space Policy Optimization", "2502.04686", ("lspo",)),
    Paper("Single-stream Policy Optimization", "2509.13232", ("spo_tracker",)),
    Paper("Bounded Ratio Reinforcement Learning", "2604.18578", ("bpo", "gbpo")),
    Paper("Self-supervised Preference Optimization: Enhance Your Language Model with "
        "Preference Degree Awareness", "2409.17791", ("spo_degree",)),
    Paper("Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response"
        " Length Variation in RLVR", "2602.05261", ("luspo",)),
    Paper("Self-Play Preference Optimization for Language Model Alignment",
        "2405.00675", ("sppo",)),
    Paper("GHPO: Adaptive Guidance for Stable and Efficient LLM Reinforcement Learning",
        "2507.10628", ("ghpo",)),
    Paper("SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF",
        "2411.01798", ("salsa_soup_ref",)),
    Paper("DISPO: Enhancing Training Efficiency and Stability in Reinforcement Learning for"
        " Large Language Model Mathematical Reasoning", "2602.00983", ("dispo",)),
    Paper("Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM "
        "Alignment", "2310.00212", ("p3o",)),
    Paper("Structured Preference Optimization for Vision-Language Long-Horizon Task Planning",
        "2502.20742", ("vlm_spo",)),
    Paper("FSPO: Few-Shot Preference Optimization of Synthetic Preference Data in LLMs "
        "Elicits Effective Personalization to Real Users", "2502.19312", ("fspo",)),
    Paper("IterResearch: Rethinking Long-Horizon Agents via Markovian State Reconstruction",
        "2511.07327", ("eapo",)),
    Paper("Boundary-Guided Policy Optimization for Memory-efficient RL of Diffusion Large "
        "Language Models", "2510.11683", ("bgpo", "dllm_elbo")),
    Paper("A Practitioner's Guide to Multi-turn Agentic Reinforcement Learning",
        "2510.01132", ("practitioner_recipe", "gae_token", "gae_turn")),
    Paper("Soft Adaptive Policy Optimization", "2511.20347", ("sapo",)),
    Paper("Think Outside the Policy: In-Context Steered Policy Optimization",
        "2510.26519", ("icpo",)),
    Paper("Agentic Reinforced Policy Optimization", "2507.19849", ("arpo",)),
    Paper("Scaf-GRPO: Scaffolded Group Relative Policy Optimization for Enhancing LLM "
        "Reasoning", "2510.19807", ("scaf_grpo",)),
    Paper("On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral",
        "2512.04220", ("llds",)),
    Paper("Iterative Nash Policy Optimization: Aligning LLMs with General Preferences via "
        "No-Regret Learning", "2407.00617", ("inpo",)),
    Paper("BRAIn: Bayesian Reward-conditioned Amortized Inference for natural language "
        "generation from feedback", "2402.02479", ("brain",)),
    Paper("EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning",
        "2509.22576", ("epo",)),
    Paper("What's Behind PPO's Collapse in Long-CoT? Value Optimization Holds the Secret",
        "2503.01491", ("vc_ppo",)),
    Paper("VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks",
        "2504.05118", ("vapo",)),
    Paper("Secrets of RLHF in Large Language Models Part I: PPO", "2307.04964", ("ppo_max",)),
    Paper("SePPO: Semi-Policy Preference Optimization for Diffusion Alignment",
        "2410.05255", ("seppo",)),
    Paper("Unifying Group-Relative and Self-Distillation Policy Optimization via Sample "
        "Routing", "2604.02288", ("srpo", "sdpo")),
    Paper("A Reinforcement Learning Method for Environments with Stochastic Variables: "
        "Post-Decision Proximal Policy Optimization with Dual Critic Networks",
        "2504.05150", ("pdppo",)),
    Paper("Reinforcing Language Agents via Policy Optimization with Action Decomposition",
        "2405.15821", ("poad",)),
    Paper("LiPO: Listwise Preference Optimization through Learning-to-Rank",
        "2402.01878", ("lipo_lambda",)),
    Paper("The Perfect Blend: Redefining RLHF with Mixture of Judges", "2409.20370", ("cgpo",)),
    Paper("Policy Filtration in RLHF to Fine-Tune LLM for Code Generation",
        "2409.06957", ("pf_ppo",)),
    Paper("SRPO: Self-Referential Policy Optimization for Vision-Language-Action Models",
        "2511.15605", ("srpo_vla",)),
    Paper("Inpainting-Guided Policy Optimization for Diffusion Large Language Models",
        "2509.10396", ("igpo_inpainting",)),
    Paper("Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM "
        "Reasoning", "2510.00819", ("capo",)),
    Paper("Random Policy Valuation is Enough for LLM Reasoning with Verifiable Rewards",
        "2509.24981", ("rover",)),
    Paper("One Step is Enough: Multi-Agent Reinforcement Learning based on One-Step Policy "
        "Optimization for Order Dispatch on Ride-Sharing Platforms", "2507.15351", ("ospo",)),
    Paper("Accelerated Preference Optimization for Large Language Model Alignment",
        "2410.06293", ("accelerated_po",)),
    Paper("SAFE: Stable Alignment Finetuning with Entropy-Aware Predictive Control for RLHF",
        "2602.04651", ("safe",)),
    Paper("Training-Free Group Relative Policy Optimization",
        "2510.08191", ("training_free_grpo",)),
    Paper("Distribution-Centric Policy Optimization Dominates Exploration-Exploitation "
        "Trade-off", "2601.12730", ("dcpo_distribution",)),
    Paper("HiPER: Hierarchical Reinforcement Learning with Explicit Credit Assignment for "
        "Large Language Model Agents", "2602.16165", ("hiper_hae",)),
    Paper("More Than One Teacher: Adaptive Multi-Guidance Policy Optimization for Diverse "
        "Exploration", "2510.02227", ("ampo",)),
    Paper("Self-Distilled RLVR", "2604.03128", ("rlsd",)),
    Paper("On-Policy RL Meets Off-Policy Experts: Harmonizing Supervised Fine-Tuning and "
        "Reinforcement Learning via Dynamic Weighting", "2508.11408", ("chord",)),
    Paper("Rewards as Labels: Revisiting RLVR from a Classification Perspective",
        "2602.05630", ("real",)),
    Paper("FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization",
        "2603.19835", ("fipo",)),
    Paper("Self-Play Fine-Tuning Converts Weak Language Models to Strong Language Models",
        "2401.01335", ("spin",)),
    Paper("Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and "
        "negative rewards", "2506.20520", ("asymre",)),
    Paper("GVPO: Group Variance Policy Optimization for Large Language Model Post-Training",
        "2504.19599", ("gvpo",)),
    Paper("Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
        "2503.14286", ("topr",)),
    Paper("On the Generalization of SFT: A Reinforcement Learning Perspective with Reward "
        "Rectification", "2508.05629", ("dft",)),
    Paper("Process Reinforcement through Implicit Rewards", "2502.01456", ("prime",)),
)
# fmt: on
