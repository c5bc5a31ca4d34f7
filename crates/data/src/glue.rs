//! SST-2, QQP and MNLI in the files of GLUE (Wang et al. 2018): tab-separated, without quoting, columns by the names in the
//! first line. The dev split is selected and reported on: the labels of the test splits were never published.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::entry::{DataKind, DataSetEntry, LoadTexts, Origin, TextTask};
use super::labelled::{LabelledTexts, Text};
use super::{DataError, LoadOptions, store};

/// The table line of SST-2.
pub static SST_2: DataSetEntry = DataSetEntry {
    name: "sst-2",
    collection: "sst-2",
    title: "SST-2",
    about: "whether a piece of a film review is positive",
    records: "67,349 / 872 pieces",
    kind: kind(SST_2_FORM, &|dir, reading| read(&SST_2_FORM, dir, reading)),
    origin: Origin::UserProvided(
        "place GLUE's folder SST-2 (https://dl.fbaipublicfiles.com/glue/data/SST-2.zip) with train.tsv and dev.tsv",
    ),
    locate: |dir| SST_2_FORM.locate(dir),
};

/// The table line of QQP.
pub static QQP: DataSetEntry = DataSetEntry {
    name: "qqp",
    collection: "qqp",
    title: "QQP",
    about: "whether two questions ask the same",
    records: "363,846 / 40,430 pairs",
    kind: kind(QQP_FORM, &|dir, reading| read(&QQP_FORM, dir, reading)),
    origin: Origin::UserProvided(
        "place GLUE's folder QQP (https://dl.fbaipublicfiles.com/glue/data/QQP-clean.zip) with train.tsv and dev.tsv",
    ),
    locate: |dir| QQP_FORM.locate(dir),
};

/// The table line of MNLI.
pub static MNLI: DataSetEntry = DataSetEntry {
    name: "mnli",
    collection: "mnli",
    title: "MNLI",
    about: "whether a sentence contradicts another, leaves it open or follows from it",
    records: "392,702 / 9,815 pairs",
    kind: kind(MNLI_FORM, &|dir, reading| read(&MNLI_FORM, dir, reading)),
    origin: Origin::UserProvided(
        "place GLUE's folder MNLI (https://dl.fbaipublicfiles.com/glue/data/MNLI.zip) with train.tsv and dev_matched.tsv",
    ),
    locate: |dir| MNLI_FORM.locate(dir),
};

/// The table line of 9,999 pairs of QQP.
pub static QQP_SAMPLE: DataSetEntry = DataSetEntry {
    name: "qqp-sample",
    collection: "qqp-sample",
    title: "a sample of QQP",
    records: "8,999 / 1,000 pairs",
    kind: kind(QQP_PAIRS, &|dir, reading| read(&QQP_PAIRS, dir, reading)),
    origin: Origin::UserProvided(
        "place the sample of QQP in the folder QQP (data/glue_pretrain of github.com/ZhengxiangShi/PowerfulPromptFT) as \
         pairs-train.json and pairs-dev.json",
    ),
    locate: |dir| QQP_PAIRS.locate(dir),
    ..QQP
};

/// The table line of 9,999 pairs of MNLI.
pub static MNLI_SAMPLE: DataSetEntry = DataSetEntry {
    name: "mnli-sample",
    collection: "mnli-sample",
    title: "a sample of MNLI",
    records: "8,999 / 1,000 pairs",
    kind: kind(MNLI_PAIRS, &|dir, reading| read(&MNLI_PAIRS, dir, reading)),
    origin: Origin::UserProvided(
        "place the sample of MNLI in the folder MNLI (data/glue_pretrain of github.com/ZhengxiangShi/PowerfulPromptFT) as \
         pairs-train.json and pairs-dev.json",
    ),
    locate: |dir| MNLI_PAIRS.locate(dir),
    ..MNLI
};

/// Longest line that is read; real ones of MNLI with their parses stay below 20 KiB.
const LONGEST: usize = 1 << 17;
/// Largest JSON file that is read.
const LARGEST: u64 = 64 << 20;

/// How the files of one task look.
struct Form {
    title: &'static str,
    folder: &'static str,
    /// Names of the training and the dev file; `.gz` may follow.
    files: [&'static str; 2],
    /// Rows of the training and the dev file of the whole set.
    rows: [usize; 2],
    /// Columns of the texts, then of the class.
    columns: &'static [&'static str],
    /// What classes are called in the files, in the order of their numbers.
    labels: &'static [&'static str],
    classes: &'static [&'static str],
    /// Whether rows with another number of fields are left out and counted (fairseq's recipe for QQP).
    leaves_out: bool,
}

const SST_2_FORM: Form = Form {
    title: "SST-2",
    folder: "SST-2",
    files: ["train.tsv", "dev.tsv"],
    rows: [67_349, 872],
    columns: &["sentence", "label"],
    labels: &["0", "1"],
    classes: &["negative", "positive"],
    leaves_out: false,
};

const QQP_FORM: Form = Form {
    title: "QQP",
    folder: "QQP",
    rows: [363_846, 40_430],
    columns: &["question1", "question2", "is_duplicate"],
    classes: &["different", "the same"],
    leaves_out: true,
    ..SST_2_FORM
};

const MNLI_FORM: Form = Form {
    title: "MNLI",
    folder: "MNLI",
    files: ["train.tsv", "dev_matched.tsv"],
    rows: [392_702, 9_815],
    columns: &["sentence1", "sentence2", "gold_label"],
    labels: &["contradiction", "neutral", "entailment"],
    classes: &["contradiction", "neutral", "entailment"],
    leaves_out: false,
};

const PAIRS: [&str; 2] = ["pairs-train.json", "pairs-dev.json"];
const QQP_PAIRS: Form = Form { title: "The sample of QQP", files: PAIRS, rows: [8_999, 1_000], ..QQP_FORM };
const MNLI_PAIRS: Form =
    Form { title: "The sample of MNLI", files: PAIRS, rows: [8_999, 1_000], ..MNLI_FORM };

const fn kind(form: Form, load: LoadTexts) -> DataKind {
    DataKind::Texts(TextTask { classes: form.classes, train: form.rows[0], load })
}

impl Form {
    /// The two files in `dir`.
    fn files(&self, dir: &Path) -> Result<Option<[PathBuf; 2]>, DataError> {
        let Some(folder) = store::find(dir, &[self.folder]) else { return Ok(None) };
        let file = |name: &str| store::find_file(&folder, &[name, &format!("{name}.gz")]);
        match self.files.map(file) {
            [Some(train), Some(dev)] => Ok(Some([train, dev])),
            [None, None] => Ok(None),
            [train, _] => {
                let lacks = self.files[usize::from(train.is_some())];
                Err(store::bad_file(&folder, format!("has no {lacks}; {} consists of both", self.title)))
            }
        }
    }

    fn locate(&self, dir: &Path) -> Result<Option<PathBuf>, DataError> {
        Ok(self.files(dir)?.and_then(|[train, _]| train.parent().map(Path::to_owned)))
    }

    fn class(&self, label: &str) -> Result<u32, String> {
        let at = self.labels.iter().position(|known| *known == label);
        let wrong = || format!("the label {label:?} is none of {}", self.labels.join(", "));
        at.map(|at| at as u32).ok_or_else(wrong)
    }
}

/// The set of `form` in `dir`.
fn read(form: &Form, dir: &Path, options: LoadOptions) -> Result<LabelledTexts, DataError> {
    let (what, dir) = (form.title, dir.to_owned());
    let Some(files) = form.files(&dir)? else {
        let [train, dev] = form.files;
        let next = format!(
            "place {train} and {dev} in its folder {}; effattn list tasks shows where to get them",
            form.folder
        );
        return Err(DataError::Missing { what, dir, next });
    };
    let one = |file: &Path| {
        if form.files == PAIRS { pairs(form, file).map(|texts| (texts, 0)) } else { table(form, file) }
    };
    let [(train, left_out), (dev, dev_left_out)] = [one(&files[0])?, one(&files[1])?];
    let there = [train.len() + left_out, dev.len() + dev_left_out];
    let partial = (there != form.rows).then(|| {
        let [all, all_dev] = form.rows;
        format!("{} of {all} training and {} of {all_dev} dev rows", train.len(), dev.len())
    });
    if let (Some(missing), false) = (&partial, options.allow_partial) {
        return Err(DataError::Partial { what, dir, missing: missing.clone() });
    }
    let left_out = left_out + dev_left_out;
    let remarks = (left_out > 0).then(|| format!("{what}: {left_out} rows without six fields are left out"));
    Ok(LabelledTexts::new(train, dev).said(partial, remarks.into_iter().collect()))
}

/// The rows of a tab-separated file, and how many were left out.
fn table(form: &Form, file: &Path) -> Result<(Vec<Text>, usize), DataError> {
    let (mut texts, mut left_out) = (Vec::new(), 0);
    let mut header: Option<(usize, Vec<usize>)> = None;
    store::each_line(file, LONGEST, |_, line| {
        let line = str::from_utf8(line).map_err(|_| "is not UTF-8".to_owned())?;
        let line = line.strip_suffix('\n').unwrap_or(line);
        let fields: Vec<&str> = line.strip_suffix('\r').unwrap_or(line).split('\t').collect();
        let Some((count, at)) = &header else {
            let at = form.columns.iter().map(|column| {
                let place = fields.iter().position(|field| field == column);
                let lacks = || {
                    format!(
                        "has no column {column:?}; expected the names of columns, {} among them",
                        form.columns.join(", ")
                    )
                };
                place.ok_or_else(lacks)
            });
            header = Some((fields.len(), at.collect::<Result<_, _>>()?));
            return Ok(());
        };
        if fields.len() != *count {
            if form.leaves_out {
                left_out += 1;
                return Ok(());
            }
            return Err(format!("has {} fields, expected {count} as in the first line", fields.len()));
        }
        let field = |column: usize| fields[at[column]];
        let second = (at.len() == 3).then(|| field(1).to_owned());
        texts.push(Text { first: field(0).to_owned(), second, label: form.class(field(at.len() - 1))? });
        Ok(())
    })?;
    Ok((texts, left_out))
}

/// A pair of a sample.
#[derive(Deserialize)]
struct Pair {
    text_a: String,
    text_b: String,
    label: String,
}

/// The pairs of a JSON file, in the order of their numbers.
fn pairs(form: &Form, file: &Path) -> Result<Vec<Text>, DataError> {
    let bytes = store::read_limited(store::open(file)?, LARGEST);
    let bytes = bytes.map_err(|error| store::bad_file(file, format!("cannot be read ({error})")))?;
    let mut pairs: HashMap<usize, Pair> = serde_json::from_slice(&bytes).map_err(|error| DataError::Line {
        file: file.to_owned(),
        line: error.line(),
        reason: format!("{error}; expected pairs as {{\"0\": {{\"text_a\": ..., \"text_b\": ..., \"label\": ...}}, ...}}"),
    })?;
    (0..pairs.len())
        .map(|number| {
            let wrong = |reason: String| store::bad_file(file, format!("pair {number}: {reason}"));
            let pair =
                pairs.remove(&number).ok_or_else(|| wrong("is missing; pairs count from 0".to_owned()))?;
            let label = form.class(&pair.label).map_err(wrong)?;
            Ok(Text { first: pair.text_a, second: Some(pair.text_b), label })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    const PARTIAL: LoadOptions = LoadOptions { allow_partial: true, strict: false, keep_close: false };

    fn folder(name: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("glue").join(name);
        std::fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|(file, text)| std::fs::write(folder.join(file), text).unwrap());
        dir
    }

    fn says(form: &Form, dir: &tempfile::TempDir) -> String {
        read(form, dir.path(), PARTIAL).err().expect("an error").to_string()
    }

    #[test]
    fn columns_are_found_by_their_names() {
        let train = "gold_label\tsentence2\tx\tsentence1\nneutral\tb\t\"\ta\n";
        let dir = folder("MNLI", &[("train.tsv", train), ("dev_matched.tsv", train)]);
        let set = read(&MNLI_FORM, dir.path(), PARTIAL).unwrap();
        let text = Text { first: "a".to_owned(), second: Some("b".to_owned()), label: 1 };
        assert_eq!(set.side(Split::Train), [text]);
        assert_eq!(set.partial(), Some("1 of 392702 training and 1 of 9815 dev rows"));
        assert!(read(&MNLI_FORM, dir.path(), LoadOptions::default()).is_err(), "incomplete");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let good = "sentence\tlabel\nfine \t1\n";
        for (bad, expected) in [
            ("sentence\tclass\nfine\t1\n", "train.tsv:1: has no column \"label\""),
            ("fine\t1\n", "train.tsv:1: has no column \"sentence\""),
            ("sentence\tlabel\nfine\t1\nbad\n", "train.tsv:3: has 1 fields, expected 2"),
            ("sentence\tlabel\nfine\t2\n", "train.tsv:2: the label \"2\" is none of 0, 1"),
        ] {
            let dir = folder("SST-2", &[("train.tsv", bad), ("dev.tsv", good)]);
            assert!(says(&SST_2_FORM, &dir).contains(expected), "{}", says(&SST_2_FORM, &dir));
        }
        let dir = folder("SST-2", &[("train.tsv", good)]);
        assert!(says(&SST_2_FORM, &dir).contains("has no dev.tsv"), "{}", says(&SST_2_FORM, &dir));
        assert!(SST_2_FORM.locate(dir.path()).is_err());
        let empty = tempfile::tempdir().unwrap();
        assert!(says(&SST_2_FORM, &empty).contains("place train.tsv and dev.tsv"));
    }

    #[test]
    fn short_rows_of_qqp_are_left_out_and_counted() {
        let rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\tb\t1\n4\t5\tc\n";
        let dir = folder("QQP", &[("train.tsv", rows), ("dev.tsv", rows)]);
        let set = read(&QQP_FORM, dir.path(), PARTIAL).unwrap();
        assert_eq!(set.side(Split::Train).len(), 1);
        assert_eq!(set.remarks(), ["QQP: 2 rows without six fields are left out"]);
        let empty = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\tb\t\n";
        let dir = folder("QQP", &[("train.tsv", empty), ("dev.tsv", rows)]);
        assert!(says(&QQP_FORM, &dir).contains("train.tsv:2: the label \"\""));
    }

    #[test]
    fn samples_are_pairs_in_the_order_of_their_numbers() {
        let pair = |number: usize, label: &str| {
            format!("\"{number}\": {{\"text_a\": \"a{number}\", \"text_b\": \"b\", \"label\": \"{label}\"}}")
        };
        let all: Vec<String> = [10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9].map(|number| pair(number, "1")).into();
        let good = format!("{{{}}}", all.join(",\n"));
        let dir = folder("QQP", &[("pairs-train.json", &good), ("pairs-dev.json", &good)]);
        let set = read(&QQP_PAIRS, dir.path(), PARTIAL).unwrap();
        assert_eq!(set.side(Split::Train)[10].first, "a10");
        for (bad, expected) in [
            (format!("{{{}}}", pair(1, "1")), "pair 0: is missing"),
            (format!("{{{}}}", pair(0, "7")), "pair 0: the label \"7\" is none of 0, 1"),
            ("{\n\"0\": 5}".to_owned(), "pairs-train.json:2: invalid type"),
        ] {
            let dir = folder("QQP", &[("pairs-train.json", &bad), ("pairs-dev.json", &good)]);
            assert!(says(&QQP_PAIRS, &dir).contains(expected), "{}", says(&QQP_PAIRS, &dir));
        }
    }
}
