//! `charlm`: character language models by the protocol of Transformer-LS Table 4: phases of growing length, a cache
//! carried along contiguous streams, evaluation behind a long cache or in long overlapping windows.

pub mod eval;
pub mod generate;
pub mod plan;
pub mod recipe;
pub mod request;
mod stored_input;
pub mod streams;
pub mod witten_bell;
pub mod worker;

use super::definition::{AltAction, Flag, ProtocolInfo, Quick, Tasks};
use super::own_data::DATA;
use effattn_model::family::causal;
use effattn_record::Metric;
use effattn_record::config::settings::groups::{MACHINE, MODEL, TRAINING};
use effattn_record::config::settings::within;
use effattn_record::own_setting;

own_setting! {
    /// Number of training phases of growing length, 1 to 3
    pub PHASES: u64 = "phases", "Budget", "N", |text| within(text, 1, 3);
}

const INFO: ProtocolInfo = ProtocolInfo {
    examples: EXAMPLES,
    own: &[&PHASES.setting, &DATA.setting],
    settings: &[
        TRAINING,
        MODEL,
        MACHINE,
        &[
            "timeout",
            "steps",
            "rate",
            "phases",
            "limit",
            "every",
            "accumulate",
            "overlap",
            "allow_partial",
            "data",
        ],
    ],
    help: &[
        ("len", "Symbols per segment, one value per phase: 512,1024"),
        ("batch", "Parallel streams, instead of the protocol's"),
        ("steps", "Training steps per phase, instead of the protocol's"),
        ("rate", "Learning rate of the first phase, instead of the protocol's; halved with each phase"),
        ("limit", "Evaluate on at most the first N symbols of the validation and test parts"),
        (
            "data",
            "A text of your own instead of a corpus, read as bytes: book.txt, divided 90/5/5 in its order, or train.txt,val.txt,test.txt",
        ),
    ],
    presets: causal::presets,
    tasks: Some(Tasks { called: "Corpora", names: request::names }),
    quick: Some(Quick {
        help: "Train a small model on the built-in sample text (not the paper's protocol)",
        said: "ls:w=64 with 2 layers, width 128, 4 heads, FFN 512 and no dropout on the built-in sample text, at most 200 updates of 256 \
               symbols, batch 4, rate 3e-3, unless flags say otherwise: not the paper's protocol",
    }),
    metrics: &[
        Metric {
            name: "bpc_stream",
            title: "Bits per character of the test part, blocks with a cache",
            unit: "bpc",
            lower_is_better: true,
        },
        Metric {
            name: "bpc_stream_skipping",
            title: "Bits per character of the test part, blocks with a cache, without the first symbol of each (as the released script)",
            unit: "bpc",
            lower_is_better: true,
        },
        Metric {
            name: "bpc_overlap",
            title: "Bits per character of the test part, overlapping windows",
            unit: "bpc",
            lower_is_better: true,
        },
        Metric {
            name: "dev_bpc",
            title: "Bits per character of the validation part, as the test part is evaluated",
            unit: "bpc",
            lower_is_better: true,
        },
    ],
    delegates_to: &["speed"], // Figure 3 measures steps
    alternative: Some(AltAction { heading: "Text", flags: GENERATE, run: generate::generate }),
    ..ProtocolInfo::new(
        "charlm",
        "Train character language models and test them on enwik8 and text8 (Transformer-LS, Table 4)",
    )
};

pub struct CharLm;

/// Drawing text instead of training.
const GENERATE: &[Flag] = &[
    Flag {
        name: "generate",
        value: "RUN|FILE",
        help: "Generate text with a trained model instead of training: a run folder, its name, latest, or a checkpoint",
        default: None,
    },
    Flag { name: "prompt", value: "TEXT", help: "Text to continue", default: Some("") },
    Flag { name: "symbols", value: "N", help: "Number of symbols to generate", default: Some("500") },
    Flag {
        name: "temperature",
        value: "T",
        help: "Sampling temperature; 0 always takes the most likely symbol",
        default: Some("0.8"),
    },
];

const EXAMPLES: &str = "\
Examples:
  # A small model on the built-in sample text: less than a minute
  effattn charlm --quick
  # What Transformer-LS Table 4 would take here
  effattn charlm --task enwik8 --model ls --dry-run
  # A small model on an incomplete enwik8
  effattn charlm --task enwik8 --allow-partial --limit 50000 \\
      --model ls:w=128,transformer-xl --steps 400 --len 512 --batch 4 \\
      --set layers=4 --set width=256 --set heads=4 --set ffn=1024 --rate 1e-3
  # A text of your own
  effattn charlm --quick --data book.txt --steps 1000
  # Time and memory against length, measured as effattn speed does
  effattn charlm --suite ls-figure3 --set layers=1 --dry-run
  # Text from a trained model
  effattn charlm --generate latest --prompt 'The '

The result is the bits per character of the test part, with the weights of the best evaluation (and, as ..._last, of the last update). bpc_stream: blocks with a cache of the text before them, every symbol counted; bpc_stream_skipping: the same without the first symbol of every block, as the released script counts; bpc_overlap: overlapping windows, each encoded on its own. A killed or stopped run resumes from its last checkpoint when the same command is given again.";
