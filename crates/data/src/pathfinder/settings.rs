//! What an image of each size looks like: 32 pixels, 64 pixels, and Path-X at 128.

/// Settings of one image size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Side of the image in pixels.
    pub size: usize,
    /// Length of a dash.
    pub dash: usize,
    /// Thickness of a dash.
    pub thickness: f64,
    /// Free pixels around a dash; one is drawn per image.
    pub margins: &'static [usize],
    /// Distance of the two curves' first ends, and half the width of the frame that seeds keep free.
    pub seed_distance: usize,
    /// Radius of a marker.
    pub marker: f64,
    /// Factor on the turning angle between two dashes.
    pub continuity: f64,
    /// Dashes of a target curve.
    pub contour: usize,
    /// Number of distractors.
    pub distractors: usize,
    /// Dashes of a distractor.
    pub distractor: usize,
    /// Contrast of target dashes relative to distractors.
    pub contrast: f64,
}

/// Pathfinder at 32 x 32 pixels.
pub const PATHFINDER32: Settings = Settings {
    size: 32,
    dash: 2,
    thickness: 0.5,
    margins: &[1],
    seed_distance: 7,
    marker: 1.5,
    continuity: 1.0,
    contour: 14,
    distractors: 5,
    distractor: 4,
    contrast: 0.75,
};

/// Pathfinder at 64 x 64 pixels.
pub const PATHFINDER64: Settings = Settings {
    size: 64,
    dash: 5,
    thickness: 1.0,
    margins: &[1],
    seed_distance: 12,
    marker: 2.5,
    continuity: 1.8,
    contour: 14,
    distractors: 5,
    distractor: 4,
    contrast: 0.8,
};

/// Path-X: 128 x 128 pixels.
pub const PATHFINDER128: Settings = Settings {
    size: 128,
    dash: 5,
    thickness: 1.5,
    margins: &[2, 3],
    seed_distance: 20,
    marker: 3.0,
    continuity: 1.8,
    contour: 14,
    distractors: 8,
    distractor: 4,
    contrast: 0.9,
};
