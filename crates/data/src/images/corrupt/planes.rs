//! Images as planes of numbers, and the operations on them that corruptions are made of.

use image::{Rgb, RgbImage};

/// Planes of `width` x `height` numbers, row by row: red, green and blue of an image on 0 to 1, or a single layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Planes {
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// The planes.
    pub planes: Vec<Vec<f32>>,
}

/// What lies beyond the edges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Border {
    /// The last place: a | a b c | c.
    Nearest,
    /// Mirrored with the last place twice: b a | a b c | c b.
    Reflect,
    /// Mirrored at the last place: c b | a b c | b a.
    Reflect101,
}

impl Border {
    /// The place from 0 to `len` - 1 that stands for `at`.
    pub fn place(self, at: i64, len: usize) -> usize {
        let len = len as i64;
        let mirrored = |period: i64, twice: i64| {
            let at = at.rem_euclid(period.max(1));
            if at < len { at } else { period - twice - at }
        };
        let place = match self {
            Self::Nearest => at.clamp(0, len - 1),
            Self::Reflect => mirrored(2 * len, 1),
            Self::Reflect101 => mirrored(2 * len - 2, 0),
        };
        place as usize
    }
}

/// What every place of a line is made of: a first place and the weights from there on.
pub type Weights = Vec<(usize, Vec<f32>)>;

/// Weights of a symmetric kernel whose middle is its first number.
pub fn symmetric(kernel: &[f64], len: usize, border: Border) -> Weights {
    let reach = kernel.len() as i64 - 1;
    let row = |at: usize| {
        let mut row = vec![0.0f32; len];
        let (mut first, mut last) = (len, 0);
        for step in -reach..=reach {
            let place = border.place(at as i64 + step, len);
            row[place] += kernel[step.unsigned_abs() as usize] as f32;
            (first, last) = (first.min(place), last.max(place));
        }
        (first, row[first..=last].to_vec())
    };
    (0..len).map(row).collect()
}

/// exp(-i^2 / 2 sigma^2) for i = 0..=`reach`, its sum over both sides 1.
pub fn bell(sigma: f64, reach: usize) -> Vec<f64> {
    let one = |i: usize| if i == 0 { 1.0 } else { (-0.5 * (i as f64 / sigma).powi(2)).exp() };
    let all: Vec<f64> = (0..=reach).map(one).collect();
    let sum = 2.0 * all.iter().sum::<f64>() - 1.0;
    all.into_iter().map(|value| value / sum).collect()
}

/// A number on 0 to 1 as one of 256 steps, cut off and not rounded; less than a thousandth below a step is that step, so that
/// sums in single precision do not lose one.
pub fn truncated(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0 + 1e-3) as u8
}

impl Planes {
    /// The channels of `image` on 0 to 1.
    pub fn of(image: &RgbImage) -> Self {
        let plane =
            |channel: usize| image.pixels().map(|pixel| f32::from(pixel.0[channel]) / 255.0).collect();
        Self {
            width: image.width() as usize,
            height: image.height() as usize,
            planes: (0..3).map(plane).collect(),
        }
    }

    /// One plane, whose numbers are `of(x, y)` in the order of the rows.
    pub fn layer((width, height): (usize, usize), mut of: impl FnMut(usize, usize) -> f32) -> Self {
        let plane = (0..width * height).map(|at| of(at % width, at / width)).collect();
        Self { width, height, planes: vec![plane] }
    }

    /// The image: numbers are cut to 0 to 1, and to a step of 255.
    pub fn image(&self) -> RgbImage {
        RgbImage::from_fn(self.width as u32, self.height as u32, |x, y| {
            let at = y as usize * self.width + x as usize;
            Rgb([0, 1, 2].map(|channel: usize| truncated(self.planes[channel][at])))
        })
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// Every number through `map`, pixel by pixel, channel by channel.
    #[must_use]
    pub fn map(mut self, mut map: impl FnMut(f32) -> f32) -> Self {
        for at in 0..self.width * self.height {
            self.planes.iter_mut().for_each(|plane| plane[at] = map(plane[at]));
        }
        self
    }

    /// Every number and the one of `layer` at its place through `map`.
    #[must_use]
    pub fn with(mut self, layer: &Self, map: impl Fn(f32, f32) -> f32) -> Self {
        for (number, plane) in self.planes.iter_mut().enumerate() {
            let other = &layer.planes[number % layer.planes.len()];
            plane.iter_mut().zip(other).for_each(|(a, b)| *a = map(*a, *b));
        }
        self
    }

    /// Cut to steps of 255.
    #[must_use]
    pub fn steps(self) -> Self {
        self.map(|value| f32::from(truncated(value)) / 255.0)
    }

    /// Rows and columns mixed with weights along the columns, then along the rows; between the two, numbers go
    /// through `between`.
    #[must_use]
    pub fn mixed(&self, columns: &Weights, rows: &Weights, between: fn(f32) -> f32) -> Self {
        let (width, height) = (columns.len(), rows.len());
        let plane = |plane: &Vec<f32>| {
            let mut wide = Vec::with_capacity(width * self.height);
            for line in plane.chunks_exact(self.width) {
                wide.extend(columns.iter().map(|(first, weights)| {
                    between(line[*first..].iter().zip(weights).map(|(a, b)| a * b).sum())
                }));
            }
            let mut out = vec![0.0f32; width * height];
            for (line, (first, weights)) in out.chunks_exact_mut(width.max(1)).zip(rows) {
                for (from, weight) in wide.chunks_exact(width.max(1)).skip(*first).zip(weights) {
                    line.iter_mut().zip(from).for_each(|(sum, value)| *sum += weight * value);
                }
            }
            out
        };
        Self { width, height, planes: self.planes.iter().map(plane).collect() }
    }

    /// Blurred with a bell of `sigma` pixels that reaches `truncate` times as far.
    #[must_use]
    pub fn blurred(&self, sigma: f64, truncate: f64, border: Border) -> Self {
        let kernel = bell(sigma, (truncate * sigma + 0.5) as usize);
        let weights = |len: usize| symmetric(&kernel, len, border);
        self.mixed(&weights(self.width), &weights(self.height), |value| value)
    }

    /// What lies at `from(x, y)` = (column, row) for every place, bilinear.
    #[must_use]
    pub fn sampled(&self, border: Border, from: impl Fn(usize, usize) -> (f64, f64)) -> Self {
        let mut planes = vec![Vec::with_capacity(self.width * self.height); self.planes.len()];
        for y in 0..self.height {
            for x in 0..self.width {
                let (column, row) = from(x, y);
                let (left, top) = (column.floor(), row.floor());
                let (u, v) = ((column - left) as f32, (row - top) as f32);
                let column = |step: i64| border.place(left as i64 + step, self.width);
                let line = |step: i64| border.place(top as i64 + step, self.height) * self.width;
                let (near, far, upper, lower) = (column(0), column(1), line(0), line(1));
                for (out, plane) in planes.iter_mut().zip(&self.planes) {
                    let above = (1.0 - u) * plane[upper + near] + u * plane[upper + far];
                    let below = (1.0 - u) * plane[lower + near] + u * plane[lower + far];
                    out.push((1.0 - v) * above + v * below);
                }
            }
        }
        Self { planes, ..*self }
    }

    /// The middle part of 1 / `factor` of each side, enlarged until its corners are those of the image.
    #[must_use]
    pub fn zoomed(&self, factor: f64) -> Self {
        // first place of the part, and how far apart neighbours of the result lie in it
        let along = |len: usize| {
            let part = (len as f64 / factor).ceil() as usize;
            let large = (part as f64 * factor).round_ties_even() as usize;
            let step = part.saturating_sub(1) as f64 / large.saturating_sub(1).max(1) as f64;
            (((len - part) / 2) as f64 + (large.saturating_sub(len) / 2) as f64 * step, step)
        };
        let ((left, across), (top, down)) = (along(self.width), along(self.height));
        self.sampled(Border::Nearest, |x, y| (left + x as f64 * across, top + y as f64 * down))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(values: &[f32]) -> Planes {
        Planes::layer((values.len(), 1), |x, _| values[x])
    }

    #[test]
    fn borders_fold_places_back() {
        let places = |border: Border| (-4..8).map(|at| border.place(at, 4)).collect::<Vec<_>>();
        assert_eq!(places(Border::Nearest), [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3]);
        assert_eq!(places(Border::Reflect), [3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0]);
        assert_eq!(places(Border::Reflect101), [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]);
        for border in [Border::Nearest, Border::Reflect, Border::Reflect101] {
            assert!((-9..9).all(|at| border.place(at, 1) == 0), "{border:?}");
        }
    }

    #[test]
    fn a_blur_by_hand() {
        let kernel = bell(1.0, 1);
        let edge = (-0.5f64).exp();
        assert!((kernel[0] - 1.0 / (1.0 + 2.0 * edge)).abs() < 1e-12);
        assert!((kernel[1] - edge / (1.0 + 2.0 * edge)).abs() < 1e-12);
        // truncate 1 x sigma 1 + 0.5 reaches one place
        let blurred = line(&[1.0, 0.0, 0.0]).blurred(1.0, 1.0, Border::Reflect);
        let (middle, side) = (kernel[0] as f32, kernel[1] as f32);
        let expected = [middle + side, side, 0.0];
        assert!(blurred.planes[0].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{blurred:?}");
        // a kernel that is wider than the image keeps the sum
        let wide = line(&[1.0, 0.0, 0.0, 0.5]).blurred(9.0, 4.0, Border::Reflect);
        assert!((wide.planes[0].iter().sum::<f32>() - 1.5).abs() < 1e-5);
    }

    #[test]
    fn a_zoom_keeps_the_corners_of_its_part() {
        let picture = Planes::layer((8, 8), |x, y| (8 * y + x) as f32);
        assert_eq!(picture.zoomed(1.0), picture);
        // the middle 4 x 4 from (2, 2) to (5, 5), over 8 places
        let large = picture.zoomed(2.0);
        let at = |x: usize, y: usize| large.planes[0][8 * y + x];
        assert_eq!([at(0, 0), at(7, 0), at(0, 7), at(7, 7)], [18.0, 21.0, 42.0, 45.0]);
        assert!((at(1, 0) - (18.0 + 3.0 / 7.0)).abs() < 1e-5);
    }

    #[test]
    fn steps_are_cut_off_not_rounded() {
        assert_eq!(
            [-0.1, 0.0, 0.99 / 255.0, 1.01 / 255.0, 0.9999, 1.0, 7.0].map(truncated),
            [0, 0, 0, 1, 254, 255, 255]
        );
        let image = RgbImage::from_fn(16, 16, |x, y| Rgb([(16 * y + x) as u8, 255 - x as u8, y as u8]));
        assert_eq!(Planes::of(&image).image(), image, "an image comes back as it was");
    }
}
