//! How mechanisms look: one colour, marker and stroke each, the same in every chart and for ever.
//!
//! Colours that the colour-blind can tell apart; markers and strokes for black-and-white print.

use plotters::style::RGBColor;

/// Seven colours of Okabe and Ito ("Color universal design", 2008). Their eighth, yellow, is left out: it cannot be
/// read on white paper.
const COLORS: [RGBColor; 7] = [BLACK, BLUE, VERMILION, GREEN, PINK, ORANGE, SKY];
const BLACK: RGBColor = RGBColor(0x00, 0x00, 0x00);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const PINK: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
/// Three of Tol's muted scheme ("Colour schemes", 2021) that resemble none of the seven, for charts in which nothing but the colour tells
/// lines apart.
const FURTHER: [RGBColor; 3] =
    [RGBColor(0x88, 0x22, 0x55), RGBColor(0x99, 0x99, 0x33), RGBColor(0x33, 0x22, 0x88)];
const GREY: RGBColor = RGBColor(0xa8, 0xa8, 0xa8);

const MARKERS: [Marker; 7] =
    [Marker::Circle, Marker::Square, Marker::Up, Marker::Diamond, Marker::Down, Marker::Hexagon, Marker::Bow];
const DASHES: [Dash; 4] = [Dash::Solid, Dash::Dashed, Dash::Dotted, Dash::Mixed];

/// The look of every mechanism: kin share a colour, the best-known of them is solid. A line is only ever added.
const MECHANISMS: [(&str, RGBColor, Marker, Dash); 40] = [
    ("full", BLACK, Marker::Circle, Dash::Solid),
    ("transformer-xl", BLACK, Marker::Circle, Dash::Dashed),
    ("synthesizer", BLACK, Marker::Down, Dash::Dotted),
    ("ls", BLUE, Marker::Square, Dash::Solid),
    ("dp", BLUE, Marker::Up, Dash::Dashed),
    ("window", BLUE, Marker::Diamond, Dash::Dotted),
    ("linformer", VERMILION, Marker::Up, Dash::Solid),
    ("linformer-window", VERMILION, Marker::Square, Dash::Dashed),
    ("nystrom", VERMILION, Marker::Hexagon, Dash::Dotted),
    ("linear", GREEN, Marker::Diamond, Dash::Solid),
    ("relu-linear", GREEN, Marker::Down, Dash::Dashed),
    ("identity-linear", GREEN, Marker::Square, Dash::Dotted),
    ("leakyrelu-linear", GREEN, Marker::Bow, Dash::Mixed),
    ("performer", PINK, Marker::Down, Dash::Solid),
    ("rfa", PINK, Marker::Diamond, Dash::Dashed),
    ("reformer", PINK, Marker::Bow, Dash::Dotted),
    ("cosformer", ORANGE, Marker::Hexagon, Dash::Solid),
    ("sinkhorn", ORANGE, Marker::Up, Dash::Dashed),
    ("sparse", ORANGE, Marker::Circle, Dash::Dotted),
    ("local", SKY, Marker::Bow, Dash::Solid),
    ("longformer", SKY, Marker::Circle, Dash::Dashed),
    ("bigbird", SKY, Marker::Hexagon, Dash::Dotted),
    ("ls2d", BLUE, Marker::Bow, Dash::Mixed),
    ("rope", BLACK, Marker::Square, Dash::Solid),
    ("gqa", BLACK, Marker::Diamond, Dash::Solid),
    ("streaming", BLUE, Marker::Circle, Dash::Solid),
    ("mamba2", VERMILION, Marker::Diamond, Dash::Solid),
    ("retention", VERMILION, Marker::Circle, Dash::Solid),
    ("gla", VERMILION, Marker::Bow, Dash::Solid),
    ("gated-deltanet", PINK, Marker::Square, Dash::Solid),
    ("deltanet", PINK, Marker::Up, Dash::Solid),
    ("based", GREEN, Marker::Up, Dash::Solid),
    ("aft-simple", GREEN, Marker::Circle, Dash::Solid),
    ("aft-local", GREEN, Marker::Hexagon, Dash::Solid),
    ("luna", ORANGE, Marker::Diamond, Dash::Solid),
    ("fnet", ORANGE, Marker::Square, Dash::Solid),
    ("mega", SKY, Marker::Square, Dash::Solid),
    ("mega-ema", SKY, Marker::Down, Dash::Solid),
    ("s5", SKY, Marker::Up, Dash::Solid),
    ("lru", SKY, Marker::Diamond, Dash::Solid),
];

/// Mechanisms that stay in colour where a chart has more lines than can be told apart.
const FIRST: [&str; 8] =
    ["full", "transformer-xl", "ls", "cosformer", "mamba2", "gated-deltanet", "linear", "linformer"];

/// Most lines of a chart that are in colour.
pub(super) const MOST: usize = 6;

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
    /// Dash and dot by turns.
    Mixed,
}

/// The look of one series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeriesStyle {
    pub(super) color: RGBColor,
    pub(super) dash: Dash,
    pub(super) marker: Marker,
    /// White inside.
    pub(super) open: bool,
}

impl Default for SeriesStyle {
    fn default() -> Self {
        Self::new(BLACK, Marker::Circle, Dash::Solid)
    }
}

impl SeriesStyle {
    const fn new(color: RGBColor, marker: Marker, dash: Dash) -> Self {
        Self { color, dash, marker, open: !matches!(dash, Dash::Solid) }
    }

    /// The same marker and stroke in grey: there, but not what the chart is about.
    pub(super) const fn faint(self) -> Self {
        Self { color: GREY, ..self }
    }

    /// Whether this is a [`SeriesStyle::faint`] one.
    pub(super) fn is_faint(self) -> bool {
        self.color == GREY
    }

    /// The same marker and stroke in a paler colour: a second variant of a mechanism.
    pub(super) fn paler(self) -> Self {
        let mix = |part: u8| (f64::from(part) + 0.5 * (255.0 - f64::from(part))) as u8;
        let RGBColor(red, green, blue) = self.color;
        Self { color: RGBColor(mix(red), mix(green), mix(blue)), ..self }
    }

    /// The same colour and marker, drawn through.
    pub(super) const fn solid(self) -> Self {
        Self { dash: Dash::Solid, open: false, ..self }
    }

    /// Place `index` of `count` of something that grows, such as a length: from light to dark blue.
    pub(super) fn ordinal(index: usize, count: usize) -> Self {
        let part = if count > 1 { index as f64 / (count - 1) as f64 } else { 1.0 };
        let mix =
            |light: u8, dark: u8| (f64::from(light) + part * (f64::from(dark) - f64::from(light))) as u8;
        let color = RGBColor(mix(0x7f, 0x08), mix(0xb8, 0x30), mix(0xe0, 0x6b));
        Self::new(color, MARKERS[index % MARKERS.len()], Dash::Solid)
    }

    /// The look of part `index` of a whole; `pale` for its second kind. Behind the last colour all are grey.
    pub(super) fn of_part(index: usize, pale: bool) -> Self {
        const PARTS: [RGBColor; 6] = [BLUE, VERMILION, GREEN, ORANGE, PINK, SKY];
        let color = PARTS.get(index).copied().unwrap_or(GREY);
        Self::new(color, Marker::Circle, if pale { Dash::Dotted } else { Dash::Solid })
    }

    /// The look of a series about batches of one size: a colour per size, the mechanism's marker and stroke.
    pub(crate) fn of_batch(mechanism: &str, index: usize) -> Self {
        Self { color: COLORS[1 + index % (COLORS.len() - 1)], ..looks(&[mechanism])[0] }
    }
}

/// The mechanism that a label such as `ls:w=16, batch 2` begins with.
pub(super) fn mechanism(label: &str) -> &str {
    label.split([':', ',', ' ']).next().unwrap_or(label)
}

/// A number that depends on the letters of `name` only, on every machine (FNV-1a).
fn hash(name: &str) -> usize {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 16) as usize
}

/// How the series of one chart look, no two alike: the first label that begins with a mechanism has its look, the
/// others its colour; what is unknown here has a look by its name.
pub(super) fn looks(labels: &[&str]) -> Vec<SeriesStyle> {
    let known = |name: &str| MECHANISMS.iter().find(|entry| entry.0 == name);
    let mut looks: Vec<Option<SeriesStyle>> = labels
        .iter()
        .map(|label| known(label).map(|&(_, color, marker, dash)| SeriesStyle::new(color, marker, dash)))
        .collect();
    for (index, label) in labels.iter().enumerate().filter(|(_, label)| known(label).is_none()) {
        let name = mechanism(label);
        let own = known(name).map(|entry| entry.1);
        // the only variant in a chart stands for its mechanism
        let plain = known(name).map(|&(_, color, marker, dash)| SeriesStyle::new(color, marker, dash));
        if plain.is_some() && !looks.contains(&plain) {
            looks[index] = plain;
            continue;
        }
        let first = hash(label);
        let candidates = (0..COLORS.len() * MARKERS.len() * DASHES.len()).map(|step| {
            let number = first + step;
            let color = own.unwrap_or(COLORS[hash(name) % COLORS.len()]);
            // when one colour is used up the next follows
            let color =
                if step < MARKERS.len() * DASHES.len() { color } else { COLORS[number % COLORS.len()] };
            SeriesStyle::new(
                color,
                MARKERS[number % MARKERS.len()],
                DASHES[number / MARKERS.len() % DASHES.len()],
            )
        });
        let table = MECHANISMS.iter().map(|&(_, color, marker, dash)| SeriesStyle::new(color, marker, dash));
        let all: Vec<SeriesStyle> = table.chain(looks.iter().flatten().copied()).collect();
        // a marker of the same colour and filling is the same to the eye, whatever the stroke
        let like =
            |a: &SeriesStyle, b: &SeriesStyle| (a.color, a.marker, a.open) == (b.color, b.marker, b.open);
        let same = |a: &SeriesStyle, b: &SeriesStyle| (a.color, a.marker) == (b.color, b.marker);
        let own = || candidates.clone().take(MARKERS.len() * DASHES.len());
        let chart: Vec<SeriesStyle> = looks.iter().flatten().copied().collect();
        // a chart of training and validation fills markers by what is drawn: another marker is best
        let found = own()
            .find(|look| !all.iter().any(|other| same(other, look)))
            .or_else(|| own().find(|look| !chart.iter().any(|other| same(other, look))))
            .or_else(|| own().find(|look| !all.iter().any(|other| like(other, look))))
            .or_else(|| candidates.clone().find(|look| !all.contains(look)))
            .or_else(|| candidates.clone().next());
        looks[index] = found;
    }
    looks.into_iter().map(Option::unwrap_or_default).collect()
}

/// Which of `labels` a crowded chart shows in colour: all of at most [`MOST`]; else the best-known mechanisms, then the
/// first ones.
pub(super) fn shown(labels: &[&str]) -> Vec<bool> {
    shown_of(labels, MOST)
}

/// A colour per mechanism, none twice while there are enough: the best-known ones keep theirs. For charts whose lines are too
/// dense for strokes and markers. Mechanisms beyond the last colour have none.
pub(super) fn apart(mechanisms: &[&str]) -> Vec<Option<SeriesStyle>> {
    let colors = || COLORS.into_iter().chain(FURTHER);
    let shown = shown_of(mechanisms, colors().count());
    let own = looks(mechanisms);
    let mut order: Vec<usize> = (0..mechanisms.len()).filter(|index| shown[*index]).collect();
    order.sort_by_key(|index| rank(mechanisms[*index]));
    let mut chosen: Vec<Option<SeriesStyle>> = vec![None; mechanisms.len()];
    for index in &order {
        let taken = |color: RGBColor| chosen.iter().flatten().any(|look| look.color == color);
        if !taken(own[*index].color) {
            chosen[*index] = Some(own[*index]);
        }
    }
    for index in order {
        let taken = |color: &RGBColor| chosen.iter().flatten().any(|look| look.color == *color);
        if let (None, Some(color)) = (chosen[index], colors().find(|color| !taken(color))) {
            chosen[index] = Some(SeriesStyle { color, ..own[index] });
        }
    }
    chosen
}

/// Place of a mechanism among the best-known ones.
fn rank(mechanism: &str) -> usize {
    FIRST.iter().position(|name| *name == mechanism).unwrap_or(FIRST.len())
}

fn shown_of(labels: &[&str], most: usize) -> Vec<bool> {
    if labels.len() <= most {
        return vec![true; labels.len()];
    }
    let mut order: Vec<usize> = (0..labels.len()).collect();
    order.sort_by_key(|index| rank(labels[*index]));
    let mut shown = vec![false; labels.len()];
    order.into_iter().take(most).for_each(|index| shown[index] = true);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mechanism_has_a_look_of_its_own() {
        let names = MECHANISMS.map(|entry| entry.0);
        let looks = looks(&names);
        for (i, a) in looks.iter().enumerate() {
            assert!(looks[..i].iter().all(|b| a != b), "{} looks like another", names[i]);
        }
    }

    #[test]
    fn a_look_does_not_depend_on_the_chart() {
        let alone = looks(&["ls"])[0];
        assert_eq!(looks(&["mean", "full", "ls"])[2], alone);
        assert_eq!(looks(&["mean"])[0], looks(&["full", "mean"])[1], "by its name");
        assert_ne!(looks(&["mean"])[0], looks(&["median"])[0]);
    }

    #[test]
    fn variants_share_the_colour_and_no_two_series_are_alike() {
        let labels: Vec<String> = (0..20).map(|w| format!("ls:w={w}")).chain(["ls".to_owned()]).collect();
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        let looks = looks(&labels);
        for (i, a) in looks.iter().enumerate() {
            assert!(looks[..i].iter().all(|b| a != b), "{} looks like another", labels[i]);
            assert_eq!(a.color, BLUE);
        }
    }

    #[test]
    fn a_few_variants_have_markers_of_their_own() {
        let labels =
            ["rfa", "full", "rfa:kernel=arccos", "rfa:gate=true", "rfa:kernel=arccos,gate=true", "dp"];
        let markers: Vec<_> =
            looks(&labels).into_iter().map(|look| (look.color, look.solid().marker)).collect();
        for (i, a) in markers.iter().enumerate() {
            assert!(!markers[..i].contains(a), "{} has the marker of another line", labels[i]);
        }
    }

    #[test]
    fn dense_lines_share_no_colour() {
        let names = ["dp", "full", "linformer", "ls", "nystrom", "performer", "reformer"];
        let colors: Vec<RGBColor> = apart(&names).into_iter().map(|look| look.unwrap().color).collect();
        for (index, color) in colors.iter().enumerate() {
            assert!(!colors[..index].contains(color), "{}", names[index]);
        }
        assert_eq!((colors[1], colors[2], colors[3]), (BLACK, VERMILION, BLUE), "the best-known keep theirs");
        let crowd: Vec<&str> = MECHANISMS[..11].iter().map(|entry| entry.0).collect();
        let colored: Vec<RGBColor> = apart(&crowd).into_iter().flatten().map(|look| look.color).collect();
        assert_eq!(colored.len(), 10);
        assert!((1..10).all(|index| !colored[..index].contains(&colored[index])), "{colored:?}");
    }

    #[test]
    fn a_crowd_shows_six_in_colour() {
        let crowd = ["bigbird", "rfa", "full", "dp", "window", "sparse", "local", "ls"];
        let shown = shown(&crowd);
        assert_eq!(shown.iter().filter(|shown| **shown).count(), MOST);
        assert!(shown[2] && shown[7] && shown[0] && !shown[6], "{shown:?}");
    }
}
