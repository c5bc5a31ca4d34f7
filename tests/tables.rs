//! Tables of pages are made of committed rows; EFFATTN_BLESS=1 writes them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use effattn::record::{Pass, Row, csv};
use effattn::report::reference;
use effattn::report::table::Table;

use super::prose::root;

/// Rows of the newest run of `speed` in a folder of reproduction/results, and where it is.
pub fn newest(folder: &str) -> (Vec<Row>, PathBuf) {
    let run = root().join("reproduction/results").join(folder).join("speed/latest");
    (csv::from_str(&std::fs::read_to_string(run.join("rows.csv")).unwrap()).unwrap(), run)
}

/// The first four cells of a table beside a single program, which name what was measured, and how many times as fast effattn is; how
/// the table sums up.
pub fn beside_one_program(folder: &str) -> (Vec<([String; 4], String)>, String) {
    let (rows, run) = newest(folder);
    let references = reference::with_programs(&rows, &reference::read(&run).unwrap());
    let tables = reference::tables(&rows, &references);
    let [table] = tables.as_slice() else { panic!("{folder}: one program") };
    let ratio = table.columns.iter().position(|column| column == "times as fast").unwrap();
    let cells = table.rows.iter().map(|row| (row[..4].to_vec().try_into().unwrap(), row[ratio].clone()));
    let sum = table.notes[0].split(';').next().unwrap();
    let sum = sum.split(". ").next().unwrap();
    (cells.collect(), sum.split_once(": ").map_or(String::new(), |(_, said)| said.to_owned()))
}

/// `page` with `lines` in the place of those below the table's head that starts with `head`.
pub fn with_rows_below(page: &str, head: &str, lines: &[String]) -> String {
    let at = page.find(head).unwrap_or_else(|| panic!("the page has a table {head}"));
    let (before, table) = page.split_at(at);
    let kept = table.split_inclusive('\n').take(2).map(str::len).sum::<usize>();
    let old = table[kept..].split_inclusive('\n').take_while(|line| line.starts_with('|'));
    let rest = kept + old.map(str::len).sum::<usize>();
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    format!("{before}{}{lines}{}", &table[..kept], &table[rest..])
}

/// The ratio of a cell of [`beside_one_program`], a dash where there is none.
pub fn ratio_of(cells: &[([String; 4], String)], cell: [&str; 4]) -> String {
    let found = cells.iter().find(|(it, _)| it.each_ref().map(String::as_str) == cell);
    found.map_or_else(|| "-".to_owned(), |(_, ratio)| ratio.clone())
}

/// A line per mechanism and pass: how many times as fast effattn is as PyTorch in small steps, one thread / two threads, in a column per
/// batch size and length; at last how each run sums up.
fn lines_of_small_steps() -> Vec<String> {
    let [(one, one_said), (two, two_said)] = ["one-thread", "two-threads"]
        .map(|threads| beside_one_program(&format!("peer/small-steps/{threads}")));
    let places = [["8", "64"], ["8", "256"], ["32", "64"], ["32", "256"]];
    let mut named: Vec<[&String; 2]> = Vec::new();
    for ([model, pass, _, _], _) in &one {
        if !named.contains(&[model, pass]) {
            named.push([model, pass]);
        }
    }
    named.sort_by_key(|[_, pass]| *pass);
    let line = |[model, pass]: &[&String; 2]| {
        let cells = places.map(|[batch, len]| {
            let cell = [model, pass, batch, len];
            format!(" {} / {} |", ratio_of(&one, cell), ratio_of(&two, cell))
        });
        format!("| {model} {pass} |{}", cells.concat())
    };
    let mut lines: Vec<String> = named.iter().map(line).collect();
    lines.push(format!("| all | one thread: {one_said} | | two threads: {two_said} | |"));
    lines
}

#[test]
fn the_table_of_small_steps_is_of_the_committed_runs() {
    let lines = lines_of_small_steps();
    assert!(lines.len() >= 7, "{lines:?}");
    renew("docs/performance.md", |page| with_rows_below(page, "| small steps |", &lines));
}

/// A line per mechanism: how many times as fast effattn gives the next token as PyTorch, in a column per batch size and length; at last how
/// the run sums up.
#[test]
fn the_table_of_the_next_token_is_of_the_committed_run() {
    let (cells, said) = beside_one_program("peer/decode");
    let places = [["1", "1024"], ["1", "8192"], ["16", "1024"], ["16", "8192"]];
    let line = |model: &str| {
        let ratios =
            places.map(|[batch, len]| format!(" {} |", ratio_of(&cells, [model, "decode", batch, len])));
        format!("| {model} |{}", ratios.concat())
    };
    let mut lines: Vec<String> = ["full", "linear", "cosformer"].map(line).to_vec();
    assert!(!lines.concat().contains("| - |"), "{cells:?}");
    lines.push(format!("| all | {said} | | | |"));
    renew("docs/performance.md", |page| with_rows_below(page, "| the next token |", &lines));
}

/// Of a cell of a run beside one program: peak memory over what the resident memory of the other program grew by.
fn share_of_memory(folder: &str, (model, pass, batch): (&str, Pass, u64)) -> String {
    let (rows, run) = newest(folder);
    let is = |row: &&Row| row.model == model && row.pass == Some(pass) && row.batch == Some(batch);
    let ours = rows.iter().find(|row| is(row) && row.metric == "step_time").and_then(|row| row.peak_bytes);
    let references = std::fs::read_to_string(run.join("reference.json")).unwrap();
    let mut lines = references.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let of = |line: &serde_json::Value| {
        line["model"] == model && line["mode"] == pass.word() && line["batch"] == batch
    };
    let theirs = lines.find(of).unwrap();
    let mib = |key: &str| theirs[key].as_f64().unwrap();
    let grown = (mib("peak_rss_mib") - mib("base_rss_mib")) * f64::from(1 << 20);
    format!("{:.2}", ours.unwrap() as f64 / grown)
}

#[test]
fn the_tables_of_images_and_words_are_of_the_committed_runs() {
    let image = |(name, preset, model): (&str, &str, &str)| {
        let folder = format!("peer/images/{preset}");
        let (cells, _) = beside_one_program(&folder);
        let places = [("infer", "1"), ("infer", "8"), ("train", "1"), ("train", "8")];
        let ratios =
            places.map(|(pass, batch)| format!(" {} |", ratio_of(&cells, [model, pass, batch, "224"])));
        format!("| {name} |{} {} |", ratios.concat(), share_of_memory(&folder, (model, Pass::Train, 8)))
    };
    let images = [
        ("ViL-LS-Medium", "vil-ls-medium", "ls2d"),
        ("CvT-13", "cvt-13", "full"),
        ("CvT\\*-LS-13", "cvt-13", "ls2d"),
    ];
    renew("docs/images.md", |page| with_rows_below(page, "| | infer 1 |", &images.map(image)));
    let word = |(name, folder, len): (&str, &str, &str)| {
        let (cells, _) = beside_one_program(&format!("peer/words/{folder}"));
        let ratios =
            ["full", "cosformer"].map(|model| format!(" {} |", ratio_of(&cells, [model, "train", "8", len])));
        format!("| {name} |{}", ratios.concat())
    };
    let words = [
        ("`wikitext103-small`, blocks of 256 words", "word-lm", "256"),
        ("`roberta-small`, blocks of 128 ids", "masked-lm", "128"),
    ];
    renew("docs/words.md", |page| with_rows_below(page, "| | full | cosformer |", &words.map(word)));
}

/// A line per way of measuring: the least and the most of its ratios in the rounds of the bench.
fn lines_beside_a_neighbour() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs/neighbour.csv")).unwrap();
    let mut lines: Vec<(&str, f64, f64)> = Vec::new();
    for line in text.lines().skip(1) {
        let [_, name, _, ratio] = line.split(',').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let ratio: f64 = ratio.parse().unwrap();
        match lines.last_mut().filter(|line| line.0 == name) {
            Some((_, least, most)) => (*least, *most) = (least.min(ratio), most.max(ratio)),
            None => lines.push((name, ratio, ratio)),
        }
    }
    lines.into_iter().map(|(name, least, most)| format!("| {name} | {least:.2} | {most:.2} |")).collect()
}

#[test]
fn the_ratios_beside_a_neighbour_are_those_of_the_chart() {
    let lines = lines_beside_a_neighbour();
    assert_eq!(lines.len(), 3);
    renew("docs/performance.md", |page| with_rows_below(page, "| rounds of the bench |", &lines));
}

/// A line per number of rows and layer: the highest rates of the three products, in a column per library.
fn lines_of_products() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs/products.csv")).unwrap();
    let mut best: BTreeMap<[usize; 3], BTreeMap<(&str, &str), f64>> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let [_, library, rows, inp, out, part, rate] = line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let layer = [rows, inp, out].map(|size| size.parse().unwrap());
        let most = best.entry(layer).or_default().entry((library, part)).or_default();
        *most = most.max(rate.parse().unwrap());
    }
    let line = |([rows, inp, out], rates): ([usize; 3], BTreeMap<(&str, &str), f64>)| {
        let cells = ["own", "gemm", "numpy", "torch"].map(|library| {
            let parts = ["forward", "input gradient", "weight gradient"];
            format!(" {} |", parts.map(|part| format!("{:.0}", rates[&(library, part)])).join(" / "))
        });
        format!("| `{rows}` | `{inp}` to `{out}` |{}", cells.concat())
    };
    best.into_iter().map(line).collect()
}

#[test]
fn the_products_of_a_layer_are_the_committed_ones() {
    let lines = lines_of_products();
    assert_eq!(lines.len(), 10);
    renew("docs/performance.md", |page| with_rows_below(page, "| rows | layer |", &lines));
}

/// A line per mechanism of a run of one batch size beside one program: how many times as fast effattn is, in a column per pass and
/// length; at last how the run sums up.
fn lines_by_mechanism(folder: &str) -> Vec<String> {
    let (cells, said) = beside_one_program(folder);
    let mut models: Vec<&str> = Vec::new();
    for ([model, ..], _) in &cells {
        if !models.contains(&model.as_str()) {
            models.push(model);
        }
    }
    let places = [("infer", "1024"), ("infer", "4096"), ("train", "1024"), ("train", "4096")];
    let line = |model: &&str| {
        let cells = places.map(|(pass, len)| format!(" {} |", ratio_of(&cells, [model, pass, "1", len])));
        format!("| `{model}` |{}", cells.concat())
    };
    let lines = models.iter().map(line);
    lines.chain([format!("| all | {said} | | | |")]).collect()
}

#[test]
fn the_table_of_an_older_processor_is_of_the_committed_run() {
    let lines = lines_by_mechanism("peer/avx2");
    assert!(lines.len() >= 11, "{lines:?}");
    renew("docs/performance.md", |page| with_rows_below(page, "| held to AVX2 |", &lines));
}

/// Of the newest committed run of `dtype` beside other programs in `folder`: how they sum up, and how they stand cell by cell.
fn beside_programs(folder: &str, dtype: &str) -> [Table; 2] {
    let (rows, run) = newest(&format!("{folder}/{dtype}"));
    let references = reference::with_programs(&rows, &reference::read(&run).unwrap());
    let tables = reference::tables(&rows, &references);
    tables.try_into().unwrap_or_else(|_| panic!("{}: there are several programs", run.display()))
}

/// Column of eager PyTorch in a table of `dtype`.
fn eager(dtype: &str, cells: &Table) -> usize {
    let names = [format!("torch {dtype}"), format!("torch-autocast {dtype}")];
    let column = cells.columns.iter().position(|column| names.contains(column));
    column.unwrap_or_else(|| panic!("{:?} has none of {names:?}", cells.columns))
}

/// A line per mechanism: how many times as fast effattn is as eager PyTorch, f32 / bf16, in a column per pass and length.
fn eager_table(f32: &Table, bf16: &Table) -> Vec<String> {
    let lookup = |table: &Table, dtype: &str, cell: &[String]| {
        let column = eager(dtype, table);
        let row = table.rows.iter().find(|row| row[..4] == *cell);
        row.map_or_else(|| "-".to_owned(), |row| row[column].clone())
    };
    let (mut models, mut places) = (Vec::new(), Vec::new());
    for row in &f32.rows {
        let place = (row[1].clone(), row[2].clone(), row[3].parse::<u64>().unwrap());
        if !models.contains(&row[0]) {
            models.push(row[0].clone());
        }
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places.sort();
    let head = places.iter().map(|(pass, _, len)| format!(" {pass} {len} |")).collect::<String>();
    let mut lines = vec![format!("| |{head}"), format!("|---|{}", "---:|".repeat(places.len()))];
    for model in &models {
        let cells = places.iter().map(|(pass, batch, len)| {
            let cell = [model.clone(), pass.clone(), batch.clone(), len.to_string()];
            format!(" {} / {} |", lookup(f32, "f32", &cell), lookup(bf16, "bf16", &cell))
        });
        lines.push(format!("| {model} |{}", cells.collect::<String>()));
    }
    lines
}

/// Replaces the first lines in a row of `text` that `ours` picks.
fn with_lines(text: &str, ours: impl Fn(&str) -> bool, lines: &[String]) -> String {
    let old: Vec<&str> = text.lines().collect();
    let from = old.iter().position(|line| ours(line)).expect("the page has such a line");
    let count = old[from..].iter().take_while(|line| ours(line)).count();
    let new = old[..from].iter().copied().chain(lines.iter().map(String::as_str));
    new.chain(old[from + count..].iter().copied()).map(|line| format!("{line}\n")).collect()
}

/// The runs of both formats in `folder`, and `line` of every program there.
fn summed(folder: &str, line: impl Fn(&str, &[String]) -> String) -> ([Table; 2], Vec<String>) {
    let [f32, bf16] = ["f32", "bf16"].map(|dtype| (dtype, beside_programs(folder, dtype)));
    let of = |(dtype, [sums, _]): &(&str, [Table; 2])| {
        sums.rows.iter().map(|row| line(dtype, row)).collect::<Vec<_>>()
    };
    let lines = [&f32, &bf16].into_iter().flat_map(of).collect();
    let ((_, [_, f32]), (_, [_, bf16])) = (f32, bf16);
    ([f32, bf16], lines)
}

/// Tables of pages about other programs are made of the newest committed runs; EFFATTN_BLESS=1 writes them.
#[test]
fn the_programs_side_by_side_are_those_of_the_committed_runs() {
    let ([f32, bf16], all) =
        summed("peer", |dtype, row| format!("| effattn {dtype} | {} |", row.join(" | ")));
    let (_, short) = summed("peer", |dtype, row| {
        format!("| encoder, {dtype}, vs {} | {} | {} | {} |", row[0], row[2], row[3], row[4])
    });
    let half_width =
        |dtype: &str, row: &[String]| format!("| half width, effattn {dtype} | {} |", row.join(" | "));
    let (_, elsewhere) = summed("peer/half-width", half_width);
    assert!(all.len() >= 4 && elsewhere.len() >= 4, "{all:?} {elsewhere:?}");
    let eager = eager_table(&f32, &bf16);
    renew("docs/performance.md", |page| {
        let mut page = page.to_owned();
        for (start, lines) in [("| half width, effattn", &elsewhere), ("| effattn", &all)] {
            let ours =
                |line: &str| ["f32", "bf16"].iter().any(|it| line.starts_with(&format!("{start} {it} |")));
            page = with_lines(&page, ours, lines);
        }
        let (begin, end) = page.split_once("\n| | infer ").expect("the page has a table of eager PyTorch");
        let end = with_lines(&format!("| | infer {end}"), |line| line.starts_with('|'), &eager);
        format!("{begin}\n{end}")
    });
    renew("README.md", |page| with_lines(page, |line| line.starts_with("| encoder, "), &short));
}

/// Holds that a page is what `renewed` makes of it; EFFATTN_BLESS=1 writes it.
pub fn renew(page: &str, renewed: impl FnOnce(&str) -> String) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(()); // tests of a program run side by side
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let path = root().join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let renewed = renewed(&text);
    if std::env::var_os("EFFATTN_BLESS").is_some() {
        std::fs::write(&path, &renewed).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text == renewed, "{page} is not what the rows say; EFFATTN_BLESS=1 renews it: {renewed}");
}

#[test]
fn the_memory_of_both_formats_is_that_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let peaks = ["f32", "bf16"].map(|dtype| {
        let run = root().join("reproduction/results/formats").join(dtype).join("memory/latest/rows.csv");
        csv::from_str(&std::fs::read_to_string(run).unwrap()).unwrap()
    });
    let mut models = 0;
    for line in text.lines().filter(|line| line.starts_with("| ") && line.contains(" → ")) {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let model = cells.next().unwrap();
        for (cell, len) in cells.zip([1024, 4096]) {
            let [f32, bf16] = peaks.each_ref().map(|rows: &Vec<Row>| {
                let is =
                    |row: &&Row| row.metric == "peak_memory" && row.label() == model && row.len == Some(len);
                rows.iter().find(is).and_then(|row| row.value).unwrap_or(f64::NAN)
            });
            let mib = f64::from(1 << 20);
            assert_eq!(
                cell,
                format!("{:.0} → {:.0} ({:.2})", f32 / mib, bf16 / mib, bf16 / f32),
                "{model} {len}"
            );
        }
        models += 1;
    }
    assert!(models >= 14, "{models}");
}

/// Rows of the committed runs of a suite of `recall`.
fn recalled(suite: &str) -> Vec<Row> {
    let folder = root().join("reproduction/results/recall").join(suite);
    let runs = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let runs = runs.filter(|entry| entry.file_type().unwrap().is_dir()); // `latest` is a link
    let text = |run: std::fs::DirEntry| std::fs::read_to_string(run.path().join("rows.csv")).unwrap();
    runs.flat_map(|run| csv::from_str(&text(run)).unwrap()).collect()
}

/// Cells of a line about `model`: bytes of state, means over seeds on `segments`, the mean of every seed, and the validation accuracy
/// of the worst and the best rate.
fn recall_line(rows: &[Row], model: &str, segments: [&str; 4]) -> Vec<String> {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.label() == model).collect();
    let by_seed = |metric: &str, part: &str| -> BTreeMap<u64, f64> {
        let is = |row: &&&Row| {
            let here = row.task.as_deref().and_then(|task| task.split_once(' ')).map_or("", |(_, part)| part);
            row.metric == metric && here == part
        };
        rows.iter().filter(is).filter_map(|row| Some((row.seed?, row.value?))).collect()
    };
    let mean = |values: BTreeMap<u64, f64>| values.values().sum::<f64>() / values.len() as f64;
    let state = rows.iter().find_map(|row| row.state_bytes);
    let mut cells = vec![state.unwrap_or(0).to_string()];
    cells.extend(segments.map(|part| format!("{:.1}", mean(by_seed("segment_accuracy", part)))));
    let seeds = by_seed("accuracy", "").into_values().map(|value| format!("{value:.1}"));
    cells.push(seeds.collect::<Vec<_>>().join(", "));
    let rates = ["1e-3", "3e-3", "1e-2"]
        .map(|rate| mean(by_seed("rate_validation_accuracy", &format!("rate={rate}"))));
    let (worst, best) = (rates.into_iter().fold(f64::MAX, f64::min), rates.into_iter().fold(0.0, f64::max));
    cells.push(format!("{worst:.0} to {best:.0}"));
    cells
}

#[test]
fn the_tables_of_recall_are_those_of_the_committed_runs() {
    let text = std::fs::read_to_string(root().join("docs/recall.md")).unwrap();
    for (title, suite, segments, least) in [
        ("| MQAR |", "mqar-small", ["64:4", "64:8", "64:16", "128:32"], 13),
        ("| parity |", "state-tracking-small", ["3..40", "64", "128", "256"], 13),
    ] {
        let rows = recalled(suite);
        let table = text.lines().skip_while(|line| !line.starts_with(title)).skip(2);
        let table: Vec<&str> = table.take_while(|line| line.starts_with("| ")).collect();
        assert_eq!(table.len(), least, "{title}");
        for line in table {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let model = cells[0].trim_matches('`');
            assert_eq!(cells[1..], recall_line(&rows, model, segments), "{suite} {model}");
        }
    }
}
