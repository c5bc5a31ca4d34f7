//! Charts as pixels, for programs that take no SVG.

use std::io;

/// A build without the feature draws no pixels.
#[cfg(not(feature = "png"))]
pub fn png(_svg: &str) -> io::Result<Vec<u8>> {
    Err(io::Error::other(
        "this build draws no PNG; take the SVG, or build one that does: cargo install --path . --features png",
    ))
}

/// `svg` as PNG, pixel by pixel, in a sans-serif font of this machine.
#[cfg(feature = "png")]
pub fn png(svg: &str) -> io::Result<Vec<u8>> {
    use resvg::tiny_skia::{Pixmap, Transform};
    use resvg::usvg::{Options, Tree, fontdb};
    use std::sync::Arc;

    let mut fonts = fontdb::Database::new();
    fonts.load_system_fonts();
    let family = ["DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica"];
    let known =
        |name: &&str| fonts.faces().any(|face| face.families.iter().any(|(family, _)| family == name));
    let first = fonts.faces().next().and_then(|face| face.families.first().map(|(name, _)| name.clone()));
    let Some(family) = family.into_iter().find(known).map(str::to_owned).or(first) else {
        return Err(io::Error::other(
            "this machine has no font to draw letters with; install one (such as DejaVu Sans) or take the SVG",
        ));
    };
    fonts.set_sans_serif_family(family);
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options).map_err(io::Error::other)?;
    let size = tree.size().to_int_size();
    let mut pixels =
        Pixmap::new(size.width(), size.height()).ok_or_else(|| io::Error::other("an empty chart"))?;
    resvg::render(&tree, Transform::default(), &mut pixels.as_mut());
    pixels.encode_png().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "png"))]
    #[test]
    fn a_build_without_pixels_says_how_to_get_one_with_them() {
        assert!(png("<svg/>").unwrap_err().to_string().contains("--features png"));
    }

    #[cfg(feature = "png")]
    #[test]
    fn letters_are_drawn_or_their_absence_is_told() {
        let svg = |text: &str| {
            format!("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"90\" height=\"40\">{text}</svg>")
        };
        let text = "<text x=\"5\" y=\"30\" font-family=\"sans-serif\" font-size=\"30\">ab</text>";
        match (png(&svg("")), png(&svg(text))) {
            (Ok(empty), Ok(letters)) => assert!(letters.starts_with(b"\x89PNG") && letters != empty),
            (_, Err(error)) => assert!(error.to_string().contains("no font"), "{error}"),
            (Err(error), Ok(_)) => panic!("{error}"),
        }
        assert!(png("no svg").is_err());
    }
}
