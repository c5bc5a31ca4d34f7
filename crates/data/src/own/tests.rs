use std::path::Path;

use super::*;
use crate::Dataset;

fn write(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path.display().to_string()
}

/// A table of `rows` texts; two of three are of class `a`.
fn table(rows: usize) -> String {
    let row = |at: usize| format!("text number {at},{}\n", if at.is_multiple_of(3) { "b" } else { "a" });
    "text,label\n".to_owned() + &(0..rows).map(row).collect::<String>()
}

fn says<T>(result: Result<T, DataError>) -> String {
    result.err().expect("refused").to_string()
}

#[test]
fn names_list_files_and_say_how_they_are_read() {
    let of = |name: &str| OwnFiles::of(name).unwrap();
    assert!(["listops", "listop", "text", "sample"].iter().all(|name| of(name).is_none()));
    let files = of("a.csv+b.csv:tokenizer=words:split=7").unwrap();
    assert_eq!(files.files, ["a.csv", "b.csv"].map(PathBuf::from));
    assert_eq!((files.tokenizer.as_str(), files.split), ("words", 7));
    assert_eq!(of("a.csv:tokenizer=dir/t").unwrap().tokenizer, "dir/t");
    assert_eq!(OwnFiles::name_of("a.csv, b.csv", Some("words")).unwrap(), "a.csv+b.csv:tokenizer=words");
    assert!(says(OwnFiles::name_of("reviews", None)).contains("--data reviews names no file"));
    assert!(says(OwnFiles::of("a.csv+b.csv+c.csv+d.csv")).contains("one to three files"));
    assert!(says(OwnFiles::of("a.csv+a.csv")).contains("a.csv is named twice"));
    assert!(says(OwnFiles::of("a.csv:split=x")).contains("split=x is no seed"));
}

#[test]
fn another_spelling_of_a_file_is_no_other_split() {
    let folder = tempfile::tempdir().unwrap();
    let train = write(folder.path(), "train.csv", &table(50));
    std::fs::create_dir(folder.path().join("x")).unwrap();
    let other = folder.path().join("x/../train.csv").display().to_string();
    let told = says(OwnFiles::of(&format!("{train}+{other}")));
    assert!(told.contains("x/../train.csv is named twice"), "{told}");
    #[cfg(unix)]
    {
        let link = folder.path().join("link.csv");
        std::os::unix::fs::symlink(&train, &link).unwrap();
        let told = says(OwnFiles::of(&format!("{train}+{}", link.display())));
        assert!(told.contains("link.csv is named twice"), "{told}");
    }
    let copy = write(folder.path(), "copy.csv", &table(50));
    assert!(OwnFiles::of(&format!("{train}+{copy}")).unwrap().is_some(), "two files");
}

#[test]
fn one_file_is_divided_by_its_seed() {
    let folder = tempfile::tempdir().unwrap();
    let name = write(folder.path(), "a.csv", &table(50));
    let read = |name: &str| {
        let (_, task) = crate::task(name).unwrap();
        (task.load)(Path::new(""), crate::LoadOptions::default()).unwrap()
    };
    let (set, task) = crate::task(&name).unwrap();
    assert_eq!((task.vocabulary, task.classes, task.len, task.train), (257, 2, 16, 40));
    assert_eq!(set.records, "40 / 5 / 5 texts, 2 classes");
    let data = read(&name);
    assert_eq!(Split::ALL.map(|split| data.len(split)), [40, 5, 5]);
    let seven = read(&format!("{name}:split=7"));
    assert_ne!(data.hash(), seven.hash());
    assert_eq!(data.hash(), read(&name).hash());
    let first = data.example(Split::Train, 0, 4);
    assert_eq!(first.tokens, crate::byte_ids(b"text", 4));
    assert!(division(&name).unwrap().contains("divided by seed 1: 80 % training"));
    // every row is in one split
    let all: Vec<Vec<u32>> = Split::ALL
        .into_iter()
        .flat_map(|split| (0..data.len(split)).map(move |at| (split, at)))
        .map(|(split, at)| data.example(split, at, 99).tokens)
        .collect();
    assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), 50);
    std::fs::write(&name, table(60)).unwrap();
    assert_eq!(crate::task(&name).unwrap().1.train, 48, "a file that changed is read again");
}

#[test]
fn three_files_are_the_splits_and_words_are_those_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let train = write(folder.path(), "train.csv", "text,label\nthe old bell.,1\nthe lamp,10\n");
    let other = write(folder.path(), "val.jsonl", "{\"text\": \"the new bell\", \"label\": 10}\n");
    let test = write(folder.path(), "test.tsv", "label\ttext\n1\tlamp\n");
    let name = OwnFiles::name_of(&format!("{train},{other},{test}"), Some("words")).unwrap();
    let (_, task) = crate::task(&name).unwrap();
    assert_eq!((task.vocabulary, task.classes, task.text), (7, 2, false));
    let data = (task.load)(Path::new(""), crate::LoadOptions::default()).unwrap();
    let reading = data.reading().unwrap();
    assert_eq!(reading.classes, ["1", "10"], "numbers in their order");
    assert_eq!(
        reading.units,
        TextUnits::Words(["the", ".", "bell", "lamp", "old"].map(str::to_owned).into())
    );
    let example = data.example(Split::Validation, 0, 9);
    assert_eq!((example.tokens, example.label), (vec![2, 1, 4], 1));
    assert!(division(&name).is_none());
    let (_, texts) = crate::text_task(&format!("{train}+{other}+{test}")).unwrap();
    assert_eq!((texts.classes, texts.train), (&["1", "10"][..], 2));
    // the same model on other texts
    let tested = reading.test(Path::new(&test)).unwrap();
    assert_eq!((tested.len(Split::Test), tested.example(Split::Test, 0, 9).tokens), (1, vec![5]));
    let unknown = write(folder.path(), "unknown.csv", "text,label\nlamp,2\n");
    assert!(
        says(reading.test(Path::new(&unknown))).contains("unknown.csv:2: the label \"2\" is none of those")
    );
    let pair = write(folder.path(), "pair.csv", "text1,text2,label\nlamp,bell,1\n");
    assert!(says(reading.test(Path::new(&pair))).contains("pair.csv:2: has two texts"));
}

#[test]
fn what_is_wrong_is_said_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str, content: &str| write(folder.path(), name, content);
    let good = at("good.csv", &table(20));
    let task = |name: &str| says(crate::task(name));
    let one = at("one.csv", &table(20).replace(",b", ",a"));
    assert!(task(&one).contains("one.csv: every label is \"a\"; a classifier needs at least two"));
    let few = at("few.csv", &table(9));
    assert!(task(&few).contains("few.csv: has 9 rows, which are too few to hold some out"));
    let label = at("label.csv", "text,label\nx,a\ny,c\n");
    let told = task(&format!("{good}+{label}"));
    assert!(told.contains("label.csv:3: the label \"c\" is none of those in"), "{told}");
    let pair = at("pair.csv", "text1,text2,label\nx,y,a\n");
    assert!(task(&format!("{good}+{pair}")).contains("pair.csv:2: has two texts where"));
    assert!(task("no-such.csv").contains("no-such.csv: cannot be opened"));
    assert!(
        says(crate::corpus(&at("short.txt", "abc"))).contains("short.txt: has 3 bytes, which are too few")
    );
    assert!(says(crate::words(&at("lines.txt", "a b\n"))).contains("lines.txt: has 1 lines of text"));
    assert!(says(crate::corpus(&format!("{good}:tokenizer=words"))).contains("charlm reads bytes"));
}

#[test]
fn running_text_is_divided_in_its_order() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..100).map(|line| format!("line {line} of the book\n")).collect();
    let name = write(folder.path(), "book.txt", &text);
    let (set, symbols) = crate::corpus(&name).unwrap();
    let corpus = (symbols.load)(Path::new(""), crate::LoadOptions::default()).unwrap();
    assert_eq!((corpus.parts[0].end, corpus.parts[2].end), (text.len() * 90 / 100, text.len()));
    assert_eq!(symbols.vocabulary, corpus.vocabulary);
    assert!(set.records.ends_with("bytes") && order(&name).unwrap().contains("90 % training"));
    let (_, words) = crate::words(&name).unwrap();
    let corpus = (words.load)(Path::new(""), crate::LoadOptions::default()).unwrap();
    assert_eq!(corpus.train.len(), 90 * 6);
    assert_eq!((corpus.validation.len(), corpus.tested().len()), (5 * 6, 5 * 6));
    let other = write(folder.path(), "test.txt", &text);
    let two = crate::corpus(&format!("{name}+{other}")).unwrap().1;
    let corpus = (two.load)(Path::new(""), crate::LoadOptions::default()).unwrap();
    assert_eq!(corpus.parts[2], text.len()..2 * text.len());
    assert_eq!(corpus.parts[1].end, text.len());
}
