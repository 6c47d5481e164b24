"""Looking inside: what flows, what follows when it is changed, and what a picture of attention does not say.      (guide 4.2)

    capture             every attention pattern and residual stream of a run, under TransformerLens's names
    intervene           an activation replaced by a function of it; ablate_heads and head_importance: heads switched off
    logit_lens          what the model would say after each layer
    occlusion           an input token replaced; attention_gradient: weights times their gradient
    draw_patterns       a picture; to_html: a page to click through
"""
from .attribution import attention_gradient, log_probability, occlusion
from .capture import Captured, capture
from .interventions import ablate_heads, head_importance, intervene, run_with
from .lens import Lens, logit_lens
from .pages import draw_patterns, to_html
