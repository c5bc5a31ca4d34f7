//! Sizes that a request puts in the place of a preset's.

use serde::{Deserialize, Serialize};

use crate::Backbone;
use effattn_record::config::lists::Layers;
use effattn_record::config::settings::Settings;

/// Sizes that replace the preset's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SizeOverrides {
    /// Number of blocks.
    pub layers: Option<u64>,
    /// Width of the residual stream and of all heads together.
    pub width: Option<u64>,
    /// Heads.
    pub heads: Option<u64>,
    /// Hidden width of the feed-forward half.
    pub ffn: Option<u64>,
    /// Where a document's vector comes from.
    pub pooling: Option<String>,
    /// Dropout while training.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// Dropout of attention weights while training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_dropout: Option<f64>,
}

impl SizeOverrides {
    /// Those that `settings` name.
    pub fn of(settings: &Settings) -> Self {
        Self {
            layers: settings.layers.as_ref().map(Layers::count),
            width: settings.width,
            heads: settings.heads,
            ffn: settings.ffn,
            pooling: settings.pooling.clone(),
            dropout: settings.dropout,
            attention_dropout: settings.attention_dropout,
        }
    }

    /// What they set, in words.
    pub fn words(&self) -> Vec<String> {
        let number = |name: &str, value: Option<u64>| value.map(|value| format!("{name} {value}"));
        let sizes = [
            number("layers", self.layers),
            number("width", self.width),
            number("heads", self.heads),
            number("ffn", self.ffn),
            self.pooling.as_ref().map(|pooling| format!("pooling {pooling}")),
            self.dropout.map(|dropout| format!("dropout {dropout}")),
            self.attention_dropout.map(|dropout| format!("attention dropout {dropout}")),
        ];
        sizes.into_iter().flatten().collect()
    }

    /// Puts these sizes in the place of the preset's.
    pub fn apply(&self, backbone: &mut Backbone) {
        let set = |place: &mut usize, value: Option<u64>| {
            if let Some(value) = value {
                *place = value as usize;
            }
        };
        set(&mut backbone.layers, self.layers);
        set(&mut backbone.width, self.width);
        set(&mut backbone.inner, self.width);
        set(&mut backbone.heads, self.heads);
        set(&mut backbone.ffn, self.ffn);
        backbone.dropout = self.dropout.unwrap_or(backbone.dropout);
        backbone.attention_dropout = self.attention_dropout.unwrap_or(backbone.attention_dropout);
    }
}
