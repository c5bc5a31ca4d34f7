//! How series look: colours that the colour-blind can tell apart, and shapes for black-and-white print.

use plotters::style::RGBColor;

/// Seven colours of Okabe and Ito ("Color universal design", 2008), the first for the reference series.
/// Their eighth, yellow, is left out: it cannot be read on white paper.
const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

const MARKERS: [Marker; 7] =
    [Marker::Circle, Marker::Square, Marker::Up, Marker::Diamond, Marker::Down, Marker::Hexagon, Marker::Bow];

/// Shape of a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    Circle,
    Square,
    Up,
    Diamond,
    Down,
    Hexagon,
    Bow,
}

impl Marker {
    /// Corners for radius 1, y downwards; a circle has none.
    pub(super) const fn corners(self) -> &'static [(f64, f64)] {
        match self {
            Self::Circle => &[],
            Self::Square => &[(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
            Self::Up => &[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
            Self::Diamond => &[(0.0, -1.25), (1.1, 0.0), (0.0, 1.25), (-1.1, 0.0)],
            Self::Down => &[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
            Self::Hexagon => {
                &[(-1.1, 0.0), (-0.55, -0.95), (0.55, -0.95), (1.1, 0.0), (0.55, 0.95), (-0.55, 0.95)]
            }
            Self::Bow => &[(-1.1, -0.9), (0.0, 0.0), (1.1, -0.9), (1.1, 0.9), (0.0, 0.0), (-1.1, 0.9)],
        }
    }
}

/// Stroke of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dash {
    Solid,
    Dashed,
    Dotted,
}

/// The look of one series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) color: RGBColor,
    pub(super) dash: Dash,
    pub(super) marker: Marker,
    /// White inside.
    pub(super) open: bool,
}

/// Look number `index`. The first 21 differ; the first 14 also without the dotted stroke.
pub(super) fn look(index: usize) -> Look {
    let dash = match index / COLORS.len() % 3 {
        0 => Dash::Solid,
        1 => Dash::Dashed,
        _ => Dash::Dotted,
    };
    Look {
        color: COLORS[index % COLORS.len()],
        dash,
        marker: MARKERS[(index + index / COLORS.len()) % MARKERS.len()],
        open: dash != Dash::Solid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_one_looks_differ() {
        let looks: Vec<Look> = (0..21).map(look).collect();
        for (i, a) in looks.iter().enumerate() {
            assert!(looks[..i].iter().all(|b| a != b), "look {i} repeats");
        }
    }
}
