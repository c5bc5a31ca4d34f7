//! `wordlm`: word language models on WikiText-103 by the protocol of cosFormer Table 2: adaptive input and softmax, Nesterov's
//! SGD, cosines with restarts, perplexity in blocks and behind a context.

pub mod plan;
pub mod recipe;
pub mod request;
mod stored_input;
pub mod worker;

use super::definition::{ProtocolInfo, Quick, Tasks};
use super::own_data::DATA;
use effattn_model::family::causal;
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, TRAINING};

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&DATA.setting],
    settings: &[
        TRAINING,
        &["preset", "layers", "width", "heads", "ffn", "dropout", "attention_dropout"],
        MACHINE,
        &["timeout", "steps", "rate", "limit", "every", "accumulate", "allow_partial", "data"],
    ],
    help: &[
        ("preset", "[default: that of the corpus]"),
        ("len", "Words per block and evaluation window, instead of the protocol's"),
        ("batch", "Batch size: blocks per step, instead of the protocol's"),
        ("steps", "Training steps, instead of the protocol's; warm-up and cycle are scaled with them"),
        ("limit", "Evaluate on at most the first N words of the validation and test texts"),
        (
            "data",
            "A text of your own instead of a corpus, words separated by blanks: book.txt, divided 90/5/5 in its order, or train.txt,val.txt,test.txt",
        ),
    ],
    presets: causal::presets,
    tasks: Some(Tasks { called: "Corpora", names: request::names }),
    quick: Some(Quick {
        help: "Train a small model on the built-in sample text (not the paper's protocol)",
        said: "cosformer and full with 2 layers, width 128, 4 heads, FFN 256 on the built-in sample text, at most 300 updates of 16 \
               blocks of 64 words, unless flags say otherwise: not the paper's protocol",
    }),
    metrics: &[CONTEXT, BLOCK],
    ..ProtocolInfo::new(
        "wordlm",
        "Train word language models and test them on WikiText-103 (cosFormer, Table 2)",
    )
};

pub struct WordLm;

/// Perplexity behind a context: what is set against the paper.
pub const CONTEXT: Metric = Metric {
    name: "ppl_context",
    title: "Perplexity, each word with context",
    unit: "ppl",
    lower_is_better: true,
};
/// Perplexity in blocks.
pub const BLOCK: Metric =
    Metric { name: "ppl_block", title: "Perplexity, each block alone", unit: "ppl", lower_is_better: true };

const EXAMPLES: &str = "\
Examples:
  # A small model on the built-in sample text: less than a minute
  effattn wordlm --quick
  # What cosFormer Table 2 would take on this machine
  effattn wordlm --suite cos-table2 --dry-run
  # The same rows, small enough for two cores
  effattn wordlm --suite cos-table2-small
  # Two mechanisms, 100 updates
  effattn wordlm --task wikitext103-small --model full,ls --steps 100
  # A text of your own
  effattn wordlm --quick --data book.txt

The result is the perplexity of the test text with </s> and <unk> counted, in two ways. ppl_block: every block alone. ppl_context: windows in which most words (400 of 512) serve as context and are not scored; this is the one compared with the paper's numbers. wikitext103-small trains on the published test text and is tested on the validation text, so its perplexities are comparable only with one another. A run that was stopped or killed resumes from its last checkpoint when the same command is given again.";
