//! A text of our own for measuring and for small training runs, drawn from a grammar with a fixed seed.
//!
//! Every paragraph names a keeper, a thing and a place in its first sentence and again in its last one, so that a
//! model with a long view has something to remember.

use effattn_kernel::device::rng::RngStream;

/// Bytes of [`text`].
const LEN: usize = 1 << 16;

/// What a name in angle brackets may become; `keeper`, `thing`, `place` and `look` are fixed per paragraph.
const RULES: &[(&str, &[&str])] = &[
    (
        "first",
        &[
            "In the year <year> <keeper> brought <a-thing> to the <place>.",
            "<keeper> had kept <a-thing> in the <place> since <year>.",
            "Nobody in the <place> knew why <keeper> needed <a-thing>.",
            "For <count> years <a-thing> lay in the <place>, and only <keeper> asked about it.",
        ],
    ),
    (
        "middle",
        &[
            "<neighbour> <watched> <it> from the <spot> and <said> that <claim>.",
            "\"<question>\" asked <neighbour>, but <keeper> only <answered>.",
            "When <weather>, <neighbour> <carried> <it> <direction>, <count> steps at a time.",
            "On <day> <neighbour> counted <count> <items> beside <it> and wrote the number down.",
            "<claim-start>, as <neighbour> liked to say, because <reason>.",
            "Some <people> paid <count> <coins> to see <it>; others waited until <weather>.",
            "If <reason>, then <claim>; if not, <neighbour> would <try> again on <day>.",
            "There were <count> <items> in the <spot>, <count> more in the <place>, and none of them was <quality>.",
            "<neighbour> and <neighbour> <argued> about it all <day> long.",
            "The <people> of the <place> have a saying: <claim>.",
        ],
    ),
    (
        "last",
        &[
            "And so the <look> <thing> stayed in the <place>, where <keeper> had left it.",
            "In the end <keeper> closed the <place> and took the <look> <thing> home.",
            "That is why <keeper> never again spoke of the <look> <thing> in the <place>.",
            "The <look> <thing> is still there, but the <place> no longer belongs to <keeper>.",
        ],
    ),
    ("a-thing", &["a <look> <thing>", "the <look> <thing> of <neighbour>", "one <look> <thing>"]),
    ("it", &["the <thing>", "the <look> <thing>", "it", "that <thing>"]),
    (
        "neighbour",
        &[
            "the miller",
            "Aunt Odile",
            "old Casimir",
            "the night clerk",
            "Dr Hallam",
            "a sailor",
            "Benedikta",
            "the twins",
            "Mr Quill",
            "the gardener",
            "young Ruben",
            "the judge",
            "Mrs Abernathy",
            "a stranger",
            "the apprentice",
        ],
    ),
    (
        "watched",
        &[
            "watched",
            "measured",
            "drew",
            "followed",
            "inspected",
            "admired",
            "described",
            "photographed",
            "ignored",
        ],
    ),
    (
        "said",
        &[
            "said",
            "swore",
            "wrote",
            "remembered",
            "thought",
            "explained",
            "complained",
            "was sure",
            "told us",
        ],
    ),
    (
        "claim",
        &[
            "no two <items> are <quality>",
            "whoever looks far enough back finds the beginning",
            "a <quality> thing costs twice what it weighs",
            "the <weather-noun> comes first and the <people> come later",
            "what is near is loud and what is far is <quality>",
            "<count> <items> are worth one <thing>",
            "a short answer needs a long memory",
        ],
    ),
    (
        "claim-start",
        &[
            "Nothing is <quality> twice",
            "Everything here was <quality> once",
            "Even <items> grow <quality>",
            "It was <quality>",
        ],
    ),
    (
        "reason",
        &[
            "the <items> had been moved",
            "<neighbour> forgot the key",
            "the <weather-noun> had not ended",
            "the road was <quality>",
            "every <thing> needs a <place>",
            "the clocks went <direction>",
        ],
    ),
    (
        "question",
        &[
            "What is it good for?",
            "Who made it?",
            "Is it <quality>?",
            "Where are the other <items>?",
            "Did <neighbour> see it?",
            "How many <coins> do you want?",
            "Why is it in the <spot>?",
        ],
    ),
    (
        "answered",
        &[
            "smiled",
            "shrugged",
            "pointed <direction>",
            "counted the <items>",
            "looked at <it>",
            "waited for <day>",
        ],
    ),
    (
        "weather",
        &[
            "it rained",
            "the wind turned",
            "snow fell",
            "the fog lifted",
            "the sun stood low",
            "the tide came in",
        ],
    ),
    ("weather-noun", &["rain", "frost", "thunder", "harvest", "flood", "drought", "winter"]),
    ("carried", &["carried", "pushed", "dragged", "rolled", "sent", "followed"]),
    ("direction", &["north", "south", "uphill", "downstream", "to the left", "out of sight", "back again"]),
    (
        "day",
        &[
            "Monday",
            "Tuesday",
            "Wednesday",
            "Thursday",
            "Friday",
            "Saturday",
            "Sunday",
            "market day",
            "midsummer",
        ],
    ),
    (
        "items",
        &[
            "bottles", "letters", "lanterns", "chairs", "maps", "feathers", "coins", "ladders", "violins",
            "stones", "keys",
        ],
    ),
    (
        "people",
        &["fishermen", "bakers", "travellers", "children", "printers", "weavers", "lawyers", "shepherds"],
    ),
    ("coins", &["shillings", "crowns", "pennies", "ducats", "marks"]),
    ("try", &["try", "ask", "knock", "begin", "look", "sing", "wait"]),
    ("argued", &["argued", "laughed", "quarrelled", "talked", "kept silent", "wondered"]),
    (
        "quality",
        &[
            "heavy",
            "silent",
            "blue",
            "honest",
            "broken",
            "new",
            "narrow",
            "warm",
            "forgotten",
            "equal",
            "too late",
        ],
    ),
    ("spot", &["doorway", "window", "cellar", "orchard", "bridge", "gallery", "stairwell", "courtyard"]),
    (
        "count",
        &[
            "two",
            "three",
            "five",
            "seven",
            "eleven",
            "twelve",
            "nineteen",
            "forty",
            "a hundred",
            "<digit><digit>",
        ],
    ),
    ("year", &["18<digit><digit>", "19<digit><digit>", "20<digit><digit>"]),
    ("digit", &["1", "2", "3", "4", "5", "6", "7", "8", "9"]),
];

const KEEPERS: &[&str] = &[
    "Marta Lindqvist",
    "Tobias Erne",
    "Yusuf Demir",
    "Ines Carvalho",
    "Hanna Vogel",
    "Pavel Novotny",
    "Grace Okafor",
    "Li Wen",
    "Samuel Brandt",
    "Noor Haddad",
    "Elena Petrova",
    "Jack Moreau",
];
const THINGS: &[&str] = &[
    "barometer",
    "telescope",
    "piano",
    "compass",
    "sewing machine",
    "atlas",
    "clock",
    "globe",
    "printing press",
    "kite",
    "music box",
    "weather vane",
];
const PLACES: &[&str] = &[
    "lighthouse",
    "library",
    "railway station",
    "mill",
    "harbour office",
    "town hall",
    "observatory",
    "greenhouse",
    "school",
    "bakery",
    "theatre",
    "museum",
];
const LOOKS: &[&str] =
    &["brass", "green", "crooked", "silver", "dusty", "painted", "tiny", "huge", "rusty", "glass"];

/// The text, always the same.
pub fn text() -> Vec<u8> {
    let mut stream = RngStream::new(0, "story");
    let mut text = String::new();
    while text.len() < LEN {
        paragraph(&mut stream, &mut text);
    }
    text.truncate(LEN);
    text.into_bytes()
}

fn paragraph(stream: &mut RngStream, text: &mut String) {
    let fixed = [("keeper", KEEPERS), ("thing", THINGS), ("place", PLACES), ("look", LOOKS)]
        .map(|(name, words)| (name, words[stream.below(words.len())]));
    let middles = 3 + stream.below(6);
    for sentence in std::iter::once("<first>").chain(vec!["<middle>"; middles]).chain(["<last>"]) {
        let start = text.len();
        expand(sentence, &fixed, stream, text);
        if let Some(first) = text.get_mut(start..=start) {
            first.make_ascii_uppercase();
        }
        text.push(' ');
    }
    text.pop();
    text.push_str("\n\n");
}

/// Writes `template` with its names replaced; a name that no rule has is written as it stands.
fn expand(template: &str, fixed: &[(&str, &str)], stream: &mut RngStream, text: &mut String) {
    let mut parts = template.split(['<', '>']);
    while let Some(plain) = parts.next() {
        text.push_str(plain);
        let Some(name) = parts.next() else { break };
        match (fixed.iter().find(|(known, _)| *known == name), RULES.iter().find(|(known, _)| *known == name))
        {
            (Some((_, word)), _) => text.push_str(word),
            (None, Some((_, forms))) => expand(forms[stream.below(forms.len())], fixed, stream, text),
            (None, None) => text.push_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_grammar_is_known() {
        let fixed = ["keeper", "thing", "place", "look"];
        for (rule, forms) in RULES {
            for name in forms.iter().flat_map(|form| form.split(['<', '>']).skip(1).step_by(2)) {
                let known = fixed.contains(&name) || RULES.iter().any(|(known, _)| *known == name);
                assert!(known, "{rule}: <{name}>");
            }
        }
    }

    #[test]
    fn a_paragraph_ends_with_what_it_began_with() {
        let text = String::from_utf8(text()).unwrap();
        for paragraph in text.split("\n\n").take(20) {
            let keeper = KEEPERS.iter().find(|keeper| paragraph.contains(**keeper)).unwrap();
            assert!(paragraph.rsplit(". ").next().unwrap().contains(keeper), "{paragraph}");
        }
    }
}
