//! A smaller SVG of the same picture: neighbouring strokes and marks of one look become one path, a fill and its outline one mark.

use std::fmt::Write;

/// What every text says: once for all of them.
const FAMILY: &str = " font-family=\"sans-serif\"";

/// A shape that is drawn with a fill, a stroke or both.
#[derive(Clone, Debug, PartialEq)]
struct Mark<'a> {
    fill: &'a str,
    /// Colour and width.
    stroke: Option<(&'a str, &'a str)>,
    shape: Shape<'a>,
}

#[derive(Clone, Debug, PartialEq)]
enum Shape<'a> {
    /// Points of an open line, as in the attribute.
    Line(&'a str),
    /// Both ends of a straight one.
    Straight([&'a str; 4]),
    /// Points of a closed one.
    Polygon(&'a str),
    /// Centre and radius.
    Circle([&'a str; 3]),
}

/// `svg` as the library writes it, an element a line, with fewer elements.
pub(super) fn compact(svg: &str) -> String {
    let mut out = String::with_capacity(svg.len() / 2);
    let mut path = Path::default();
    let mut lines = svg.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(mut mark) = Mark::of(line) else {
            path.flush(&mut out);
            out.push_str(&line.replace(" opacity=\"1\"", "").replace(FAMILY, ""));
            out.push('\n');
            continue;
        };
        // the outline of a filled shape follows it
        if let Some(outline) =
            lines.peek().and_then(|line| Mark::of(line)).filter(|next| mark.is_outlined_by(next))
        {
            mark.stroke = outline.stroke;
            lines.next();
        }
        path.add(&mark, &mut out);
    }
    path.flush(&mut out);
    out.replacen("<svg ", &format!("<svg{FAMILY} "), 1)
}

/// The value of an attribute of an element.
fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let from = line.find(&format!(" {name}=\""))? + name.len() + 3;
    line[from..].split('"').next()
}

impl<'a> Mark<'a> {
    /// The mark that `line` draws; nothing where it draws something else, or lets shine through.
    fn of(line: &'a str) -> Option<Self> {
        if !line.ends_with("/>") || attribute(line, "opacity") != Some("1") {
            return None;
        }
        let shape = match line.split(' ').next()? {
            "<line" => Shape::Straight([
                attribute(line, "x1")?,
                attribute(line, "y1")?,
                attribute(line, "x2")?,
                attribute(line, "y2")?,
            ]),
            "<polyline" => Shape::Line(attribute(line, "points")?.trim_end()),
            "<polygon" => Shape::Polygon(attribute(line, "points")?.trim_end()),
            "<circle" => {
                Shape::Circle([attribute(line, "cx")?, attribute(line, "cy")?, attribute(line, "r")?])
            }
            _ => return None,
        };
        let stroke = attribute(line, "stroke").filter(|color| *color != "none");
        let stroke = stroke.and_then(|color| Some((color, attribute(line, "stroke-width")?)));
        let fill = attribute(line, "fill").or(matches!(shape, Shape::Straight(_)).then_some("none"))?;
        Some(Self { fill, stroke, shape })
    }

    fn is_outlined_by(&self, next: &Self) -> bool {
        let alike = match (&self.shape, &next.shape) {
            (Shape::Circle(own), Shape::Circle(other)) => own == other,
            (Shape::Polygon(own), Shape::Line(other)) => {
                other.strip_prefix(own).is_some_and(|last| Some(last.trim()) == own.split(' ').next())
            }
            _ => false,
        };
        alike && self.stroke.is_none() && self.fill != "none" && next.fill == "none" && next.stroke.is_some()
    }

    fn look(&self) -> String {
        let mut text = format!("fill=\"{}\"", self.fill);
        if let Some((color, width)) = self.stroke {
            let _ = write!(text, " stroke=\"{color}\" stroke-width=\"{width}\"");
        }
        text
    }
}

/// Marks of one look.
#[derive(Default)]
struct Path {
    look: String,
    data: String,
}

impl Path {
    fn add(&mut self, mark: &Mark, out: &mut String) {
        let look = mark.look();
        let data = match mark.shape {
            Shape::Circle([x, y, radius]) => {
                self.flush(out);
                let _ = writeln!(out, "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" {look}/>");
                return;
            }
            Shape::Line(points) => format!("M{points}"),
            Shape::Straight([x1, y1, x2, y2]) => format!("M{x1},{y1} {x2},{y2}"),
            Shape::Polygon(points) => format!("M{points}Z"),
        };
        if look != self.look {
            self.flush(out);
            self.look = look;
        }
        self.data.push_str(&data);
    }

    fn flush(&mut self, out: &mut String) {
        if !self.data.is_empty() {
            let _ = writeln!(out, "<path {} d=\"{}\"/>", self.look, self.data);
        }
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strokes_of_one_look_become_one_path() {
        let stroke = |color: &str, points: &str| {
            format!(
                "<polyline fill=\"none\" opacity=\"1\" stroke=\"{color}\" stroke-width=\"3\" points=\"{points} \"/>\n"
            )
        };
        let svg = [stroke("#A", "1,2 3,4"), stroke("#A", "5,6 7,8"), stroke("#B", "1,1 2,2")].concat();
        let paths = "<path fill=\"none\" stroke=\"#A\" stroke-width=\"3\" d=\"M1,2 3,4M5,6 7,8\"/>\n\
                     <path fill=\"none\" stroke=\"#B\" stroke-width=\"3\" d=\"M1,1 2,2\"/>\n";
        assert_eq!(compact(&svg), paths);
    }

    #[test]
    fn a_fill_and_its_outline_become_one_mark() {
        let svg = "<polygon opacity=\"1\" fill=\"#F\" points=\"1,2 3,4 5,6 \"/>\n\
                   <polyline fill=\"none\" opacity=\"1\" stroke=\"#A\" stroke-width=\"4\" points=\"1,2 3,4 5,6 1,2 \"/>\n\
                   <circle cx=\"1\" cy=\"2\" r=\"9\" opacity=\"1\" fill=\"#F\" stroke=\"none\" stroke-width=\"1\"/>\n\
                   <circle cx=\"1\" cy=\"2\" r=\"9\" opacity=\"1\" fill=\"none\" stroke=\"#A\" stroke-width=\"4\"/>\n";
        let marks = "<path fill=\"#F\" stroke=\"#A\" stroke-width=\"4\" d=\"M1,2 3,4 5,6Z\"/>\n\
                     <circle cx=\"1\" cy=\"2\" r=\"9\" fill=\"#F\" stroke=\"#A\" stroke-width=\"4\"/>\n";
        assert_eq!(compact(svg), marks);
    }

    #[test]
    fn everything_else_stays_in_its_place() {
        let svg = "<svg width=\"1\">\n<circle cx=\"1\" cy=\"2\" r=\"9\" opacity=\"0.45\" fill=\"#F\" stroke=\"none\" stroke-width=\"1\"/>\n\
                   <text opacity=\"1\" fill=\"#A\">\nopacity of 1\n</text>\n</svg>\n";
        let small = svg.replace(" opacity=\"1\" fill=\"#A\"", " fill=\"#A\"");
        assert_eq!(compact(svg), small.replace("<svg ", "<svg font-family=\"sans-serif\" "));
    }
}
