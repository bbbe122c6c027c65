"""llama.cpp behind a static batch: as many sequences as slots, prompts read where they lie.

Why cffi's ABI mode on a wheel's shared object: no user has to compile an engine. Its price is that
nobody checks the structs below against a header, so the rules that hold here are:

- The structs are those of one exact build. Before any of them is used, the defaults that the
  library itself fills in are compared field by field; a shift by one field is refused in words.
- Slot s is sequence s. The `token` pointer of a prompt's batch is the slot's own memory; llama.cpp
  has copied the ids on when the call returns.
- Everything a step needs is made with the batcher: the cache for every sequence, the arrays of the
  batches, the greedy sampler. Only a request that samples gets an object of its own, at its start.
- One thread computes. A second one on a busy machine makes steps wait for each other for seconds.
- A batcher belongs to one thread.
"""

import secrets
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import cffi
import numpy as np

from dataplane.errors import DataplaneError
from dataplane.model import TRAINED_CONTEXT, ModelFiles

# Only what is called. Enums are ints here, pointers that stay NULL are void.
CDEF = """
struct llama_model_params {
    void *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int32_t split_mode;
    int32_t load_mode;
    int32_t lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t ctx_type;
    int32_t rope_scaling_type;
    int32_t pooling_type;
    int32_t attention_type;
    int32_t flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval;
    void *cb_eval_user_data;
    int32_t type_k;
    int32_t type_v;
    size_t moe_cache_size;
    void *abort_callback;
    void *abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void *samplers;
    size_t n_samplers;
    void *ctx_other;
};
struct llama_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};
struct llama_sampler_chain_params { bool no_perf; };

// A build whose structs are larger writes into the spare bytes, not past them.
struct model_defaults { struct llama_model_params params; char spare[512]; };
struct context_defaults { struct llama_context_params params; char spare[512]; };
struct model_defaults llama_model_default_params(void);
struct context_defaults llama_context_default_params(void);
struct llama_sampler_chain_params llama_sampler_chain_default_params(void);

void llama_log_set(void (*callback)(int level, const char *text, void *data), void *data);
void llama_backend_init(void);
void *llama_model_load_from_file(const char *path, struct llama_model_params params);
void llama_model_free(void *model);
const void *llama_model_get_vocab(const void *model);
int32_t llama_vocab_n_tokens(const void *vocab);
void *llama_init_from_model(void *model, struct llama_context_params params);
void llama_free(void *context);
uint32_t llama_n_ctx_seq(const void *context);
uint32_t llama_n_seq_max(const void *context);
void *llama_get_memory(const void *context);
bool llama_memory_seq_rm(void *memory, int32_t seq, int32_t from, int32_t to);
int32_t llama_decode(void *context, struct llama_batch batch);

void *llama_sampler_chain_init(struct llama_sampler_chain_params params);
void llama_sampler_chain_add(void *chain, void *sampler);
void *llama_sampler_init_greedy(void);
void *llama_sampler_init_top_k(int32_t k);
void *llama_sampler_init_top_p(float p, size_t min_keep);
void *llama_sampler_init_temp(float temperature);
void *llama_sampler_init_dist(uint32_t seed);
int32_t llama_sampler_sample(void *chain, void *context, int32_t index);
void llama_sampler_free(void *chain);
"""

# What the pinned build fills in. Chosen so that they lie at both ends of each struct and on both
# sides of each change of a field's size; zeroes alone would prove nothing.
_NULL = None
MODEL_DEFAULTS: dict[str, object] = {
    "devices": _NULL,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": _NULL,
    "kv_overrides": _NULL,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
CONTEXT_DEFAULTS: dict[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": _NULL,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "abort_callback": _NULL,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": _NULL,
    "n_samplers": 0,
    "ctx_other": _NULL,
}

MAX_SEQUENCES = 256  # a constant of the library
_CELLS = 256  # it rounds each sequence's room up to a multiple of this
_LOG_WARN, _LOG_ERROR = 3, 4

# Dividing logits by less overflows a float; at this temperature only a tie is left to chance.
_COLDEST = 1e-5
# To llama.cpp this seed means "random". A client's zero never gets there, so zero takes its place.
_RANDOM_SEED = 0xFFFFFFFF


class LayoutMismatch(DataplaneError):  # noqa: N818 - it names what is found
    """The shared object lays out its structs differently from what is known here."""


class EngineError(DataplaneError):
    """llama.cpp refused to load, to allocate, or was asked for more than it can do."""


# ---------------------------------------------------------------- the library


class Library:
    """The shared object, opened once, its structs checked and its log kept from stderr."""

    def __init__(self, path: str, cdef: str = CDEF) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(cdef)
        try:
            self.lib = cast(Any, self.ffi.dlopen(path))
            for name in dir(self.lib):
                getattr(self.lib, name)  # looked up now, not in the middle of a request
            self.check_layout()
        except OSError as error:
            raise EngineError(f"{path} cannot be loaded: {error}") from error
        except AttributeError as error:
            raise LayoutMismatch(f"{path} is another build of llama.cpp: {error}") from error
        self._complaints: deque[str] = deque(maxlen=4)
        # The library keeps this pointer for as long as the process lives: so must we.
        self._log = self.ffi.callback("void(int, const char *, void *)", self._on_log)
        self.lib.llama_log_set(self._log, self.ffi.NULL)
        self.lib.llama_backend_init()

    def _on_log(self, level: int, text: Any, _data: Any) -> None:
        if level in (_LOG_WARN, _LOG_ERROR):
            words: Any = self.ffi.string(text)
            self._complaints.append(" ".join(words.decode("utf-8", "replace").split()))

    def complaint(self) -> str:
        """What the library has warned of since this was last asked."""
        text = " / ".join(self._complaints) or "llama.cpp gives no reason"
        self._complaints.clear()
        return text

    def check_layout(self) -> None:
        """Compare the defaults that the library fills in with those of the pinned build."""
        model = self.lib.llama_model_default_params()
        context = self.lib.llama_context_default_params()
        wrong = self._differences(model.params, MODEL_DEFAULTS)
        wrong += self._differences(context.params, CONTEXT_DEFAULTS)
        if not self.lib.llama_sampler_chain_default_params().no_perf:
            wrong.append("no_perf of a sampler chain is false instead of true")
        if wrong:
            raise LayoutMismatch(
                "this build of llama.cpp lays out its parameters differently: "
                f"{'; '.join(wrong[:4])}{' ...' if len(wrong) > 4 else ''}; "
                "`dataplane model install` fetches the build that is known"
            )

    def _differences(self, params: Any, expected: dict[str, object]) -> list[str]:
        wrong = []
        for name, value in expected.items():
            try:
                found = getattr(params, name)
            except ValueError:  # a bool that is neither 0 nor 1
                found = "no truth value"
            wanted = self.ffi.NULL if value is _NULL else value
            if found != wanted:
                wrong.append(f"{name} is {found} instead of {wanted}")
        return wrong


@cache
def open_library(path: str) -> Library:
    """The process's one Library of that path: its log callback has to outlive every model."""
    return Library(path)


class _Batch:
    """A llama_batch with arrays of its own; `token` may be pointed elsewhere."""

    def __init__(self, ffi: Any, capacity: int) -> None:
        self.struct = ffi.new("struct llama_batch *")
        self.own_tokens = ffi.new("int32_t[]", capacity)
        pos = ffi.new("int32_t[]", capacity)
        seqs = ffi.new("int32_t[]", capacity)
        counts = ffi.new("int32_t[]", [1] * capacity)
        pointers = ffi.new("int32_t *[]", [seqs + place for place in range(capacity)])
        wanted = ffi.new("int8_t[]", capacity)
        self._alive = (pos, seqs, counts, pointers, wanted)
        batch = self.struct
        batch.token, batch.embd, batch.pos = self.own_tokens, ffi.NULL, pos
        batch.n_seq_id, batch.seq_id, batch.logits = counts, pointers, wanted
        self.tokens = np.frombuffer(ffi.buffer(self.own_tokens), np.int32)
        self.pos = np.frombuffer(ffi.buffer(pos), np.int32)
        self.seqs = np.frombuffer(ffi.buffer(seqs), np.int32)
        self.wanted = np.frombuffer(ffi.buffer(wanted), np.int8)


# ---------------------------------------------------------------- the batcher


class LlamaBatcher:
    """One llama.cpp context over all slots.

    `prefill_chunk` and `decode` return llama.cpp's code: 0 is success, and anything else leaves it
    to the caller to give up on the sequences involved (`forget` them).
    """

    def __init__(self, files: ModelFiles, slots: int, per_slot: int, chunk: int = 32) -> None:
        if not 1 <= slots <= MAX_SEQUENCES:
            raise EngineError(f"llama.cpp runs 1 to {MAX_SEQUENCES} slots, not {slots}")
        if not 1 <= per_slot <= TRAINED_CONTEXT:
            raise EngineError(
                f"context and max_output together are {per_slot} ids; "
                f"this model was trained on {TRAINED_CONTEXT}"
            )
        self.slots, self.chunk = slots, chunk
        self._library = open_library(str(files.library))
        self._ffi, self._lib = self._library.ffi, self._library.lib
        self._model: Any = None
        self._context: Any = None
        self._greedy: Any = None
        self._samplers: list[Any] = [None] * slots
        try:
            self._load(files)
            self._allocate(per_slot)
        except BaseException:
            self.close()
            raise
        self.vocab_size = int(
            self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        )
        self._memory = self._lib.llama_get_memory(self._context)
        self._prompt = _Batch(self._ffi, chunk)
        self._prompt.struct.token = self._ffi.NULL
        self._steps = _Batch(self._ffi, slots)
        self._steps.wanted[:] = 1
        self._count_up = np.arange(chunk, dtype=np.int32)

    def _load(self, files: ModelFiles) -> None:
        defaults = self._lib.llama_model_default_params()  # owns what `params` refers to
        params = defaults.params
        params.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(files.gguf).encode(), params)
        if self._model == self._ffi.NULL:
            self._model = None
            raise EngineError(
                f"{files.gguf} cannot be loaded: {self._library.complaint()}; "
                "`dataplane model install` fetches the model anew"
            )

    def _allocate(self, per_slot: int) -> None:
        defaults = self._lib.llama_context_default_params()  # owns what `params` refers to
        params = defaults.params
        room = -(-per_slot // _CELLS) * _CELLS
        params.n_ctx = self.slots * room
        params.n_batch = params.n_ubatch = max(self.chunk, self.slots)
        params.n_seq_max = self.slots
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = 1
        self._context = self._lib.llama_init_from_model(self._model, params)
        if self._context == self._ffi.NULL:
            self._context = None
            raise EngineError(
                f"llama.cpp cannot make room for {self.slots} slots of {room} ids: "
                f"{self._library.complaint()}; ask for fewer or smaller slots"
            )
        granted = self._lib.llama_n_ctx_seq(self._context)
        if granted < per_slot or self._lib.llama_n_seq_max(self._context) < self.slots:
            raise EngineError(f"llama.cpp gives {granted} ids a slot where {per_slot} are needed")
        self._greedy = self._chain(self._lib.llama_sampler_init_greedy())

    def close(self) -> None:
        """Free everything; no other method may be called afterwards."""
        for chain in (*self._samplers, self._greedy):
            if chain is not None:
                self._lib.llama_sampler_free(chain)
        self._samplers, self._greedy = [None] * self.slots, None
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    def __enter__(self) -> "LlamaBatcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ a request's beginning and end

    def _chain(self, *samplers: Any) -> Any:
        chain = self._lib.llama_sampler_chain_init(self._lib.llama_sampler_chain_default_params())
        for sampler in samplers:
            self._lib.llama_sampler_chain_add(chain, sampler)
        return chain

    def begin(self, seq: int, temperature: float, top_p: float, top_k: int, seed: int) -> None:
        """Set how `seq` samples. Zero: greedy, off, off, random; a top_p of 1 is off as well."""
        self._drop_sampler(seq)
        if temperature < _COLDEST:
            return
        if seed == 0:
            seed = 1 + secrets.randbelow(_RANDOM_SEED - 1)
        elif seed == _RANDOM_SEED:
            seed = 0
        samplers = []
        if 0 < top_k < self.vocab_size:
            samplers.append(self._lib.llama_sampler_init_top_k(top_k))
        if 0 < top_p < 1:
            samplers.append(self._lib.llama_sampler_init_top_p(top_p, 1))
        samplers.append(self._lib.llama_sampler_init_temp(temperature))
        samplers.append(self._lib.llama_sampler_init_dist(seed))
        self._samplers[seq] = self._chain(*samplers)

    def forget(self, seq: int) -> None:
        """Make `seq` empty, ready for the next request."""
        self._drop_sampler(seq)
        self.rewind(seq, 0)

    def rewind(self, seq: int, position: int) -> None:
        """Drop what `seq` holds from `position` on."""
        self._lib.llama_memory_seq_rm(self._memory, seq, position, -1)

    def complaint(self) -> str:
        """What llama.cpp has warned of since this was last asked."""
        return self._library.complaint()

    def _drop_sampler(self, seq: int) -> None:
        chain, self._samplers[seq] = self._samplers[seq], None
        if chain is not None:
            self._lib.llama_sampler_free(chain)

    # ------------------------------------------------------------ steps

    def prefill_chunk(self, seq: int, token_address: int, start: int, n: int, last: bool) -> int:
        """Run `n` ids that lie at `token_address` as positions `start`... of `seq`.

        With `last`, the next id can then be sampled at index n - 1.
        """
        if not 1 <= n <= self.chunk:
            raise EngineError(f"a chunk has 1 to {self.chunk} ids, not {n}")
        batch = self._prompt
        batch.struct.n_tokens = n
        batch.struct.token = self._ffi.cast("int32_t *", token_address)
        np.add(self._count_up[:n], start, out=batch.pos[:n])
        batch.seqs[:n] = seq
        batch.wanted[:n] = 0
        batch.wanted[n - 1] = last
        return int(self._lib.llama_decode(self._context, batch.struct[0]))

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> int:
        """Run one id for each of `seqs`; the next id of seqs[i] can then be sampled at index i."""
        count = len(seqs)
        batch = self._steps
        batch.struct.n_tokens = count
        batch.tokens[:count] = tokens
        batch.pos[:count] = positions
        batch.seqs[:count] = seqs
        return int(self._lib.llama_decode(self._context, batch.struct[0]))

    def sample(self, seq: int, index: int) -> int:
        """The next id of `seq`, from the logits at `index` of the batch that ran last."""
        chain = self._samplers[seq]
        if chain is None:
            chain = self._greedy
        return int(self._lib.llama_sampler_sample(chain, self._context, index))
