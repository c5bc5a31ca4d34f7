use super::*;

const JSON: &str = "{\"model\": \"ls-own\", \"len\": 1024, \"batch\": 1, \"mode\": \"infer\", \"ms\": 60.0, \
                        \"base_rss_mib\": 200.0, \"peak_rss_mib\": 300.0, \"runs\": 9}\n\
                        {\"model\": \"full\", \"len\": 1024, \"mode\": \"train\", \"error\": \"out of memory\"}\n";

#[test]
fn both_forms_are_read() {
    let json = parse(JSON).unwrap();
    assert_eq!((json[0].ms, json[1].ms, json[1].batch), (Some(60.0), None, 1));
    assert_eq!(parse(&to_text(&json).unwrap()).unwrap(), json);
    let csv =
        parse("model,len,batch,mode,ms,base_rss_mib,peak_rss_mib\nls,1024,1,infer,60,200,300\n").unwrap();
    assert_eq!((csv[0].ms, csv[0].mode), (Some(60.0), Pass::Infer));
    for (text, line) in [
        ("{\"model\": 1}", "line 1"),
        ("model,len,mode,ms\nls,many,infer,1\n", "line 2"),
        ("model,len,mode,s\nls,1,infer,2\n", "line 1"),
        ("", "line 1"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(line) && error.contains("expected JSON or CSV"), "{error}");
    }
}

#[test]
fn models_that_were_not_measured_are_named() {
    let rows = [Row::new("speed", "ls")];
    let known = parse("model,len,mode,ms\nls,1024,infer,60\nls-own,64,infer,1\nlss,1024,infer,60\n").unwrap();
    assert!(unmatched(&rows, &known).unwrap().ends_with("which are not shown: lss"));
    assert_eq!(unmatched(&rows, &known[..2]), None);
}

#[test]
fn a_time_that_is_no_number_above_0_is_refused_with_its_line() {
    for ms in ["NaN", "0", "-5", "inf"] {
        let text = format!("model,len,mode,ms,base_rss_mib,peak_rss_mib\nls,1024,infer,{ms},,\n");
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("line 2: ms = {ms} is no number above 0")), "{error}");
    }
    let json = JSON.replace("\"ms\": 60.0", "\"ms\": -1.5");
    assert!(parse(&json).unwrap_err().to_string().starts_with("line 1: ms = -1.5 is no number above 0"));
    let row = |seconds| Row {
        pass: Some(Pass::Infer),
        len: Some(1024),
        batch: Some(1),
        ..Row::new("speed", "ls").with("step_time", "s", Some(seconds))
    };
    let text = csv::to_string(&[row(0.5), row(0.0)]).unwrap();
    assert!(parse(&text).unwrap_err().to_string().starts_with("line 3: ms = 0 is no number above 0"));
}

#[test]
fn ratios_are_reference_over_ours() {
    let row = Row {
        pass: Some(Pass::Infer),
        len: Some(1024),
        batch: Some(1),
        peak_bytes: Some(50 << 20),
        ..Row::new("speed", "ls").with("step_time", "s", Some(0.04))
    };
    let [table] = &tables(&[row], &parse(JSON).unwrap())[..] else { panic!("a table of one program") };
    assert_eq!(table.rows, [["ls", "infer", "1", "1024", "40.0 ms", "60.0 ms", "1.50", "50 MiB", "100 MiB"]]);
    assert!(
        table.notes[0].contains("1.50 times as fast") && table.notes[0].contains("memory 0.50"),
        "{}",
        table.notes[0]
    );
    assert!(tables(&[], &parse(JSON).unwrap()).is_empty());
}

#[test]
fn ratios_have_the_interval_of_both_sides_and_say_what_it_leaves_open() {
    let row = |program: &str, seconds: f64| Row {
        pass: Some(Pass::Infer),
        len: Some(1024),
        batch: Some(1),
        program: Some(program.to_owned()),
        std: Some(0.004),
        n: Some(16),
        dtype: "f32".to_owned(),
        ..Row::new("speed", "full").with("step_time", "s", Some(seconds))
    };
    let rows = [row("effattn", 0.04), row("torch", 0.08), row("jax", 0.041)];
    let references = with_programs(&rows, &[]);
    assert_eq!(parse(&to_text(&references).unwrap()).unwrap(), references);
    let [_, cells] = &tables(&rows, &references)[..] else { panic!("two tables") };
    assert_eq!(
        cells.rows,
        [["full", "infer", "1", "1024", "40.0 ms", "2.0 ±0.1", "1.02 ±0.08, not resolved"]]
    );
    assert!(cells.notes[1].contains("not resolved: it contains 1"), "{:?}", cells.notes);
}

#[test]
fn several_programs_stand_side_by_side() {
    let ours = |len, seconds| Row {
        pass: Some(Pass::Train),
        len: Some(len),
        batch: Some(1),
        kernel: "fused".to_owned(),
        dtype: "f32".to_owned(),
        ..Row::new("speed", "ls").with("step_time", "s", Some(seconds))
    };
    let rows = [ours(512, 0.01), ours(1024, 0.02)];
    let composed = rows.clone().map(|row| Row {
        kernel: "composed".to_owned(),
        value: row.value.map(|seconds| 3.0 * seconds),
        ..row
    });
    let part = Row { operation: Some("ffn".to_owned()), ..composed[0].clone() };
    let mut references = parse(&csv::to_string(composed.iter().chain([&part])).unwrap()).unwrap();
    let peer =
        "{\"program\": \"PyTorch\", \"model\": \"ls-own\", \"len\": 1024, \"mode\": \"train\", \"ms\": 30.0}";
    references.extend(parse(peer).unwrap());
    assert_eq!(parse(&to_text(&references).unwrap()).unwrap(), references);
    let [sums, cells] = &tables(&rows, &references)[..] else { panic!("two tables") };
    assert_eq!(
        sums.rows,
        [
            ["candle's operations f32", "ls train 512", "2", "3.00", "3.00"],
            ["PyTorch", "ls train 1024", "1", "1.50", "1.50"],
        ]
    );
    assert_eq!(
        cells.rows,
        [
            ["ls", "train", "1", "512", "10.0 ms", "3.00", "-"],
            ["ls", "train", "1", "1024", "20.0 ms", "3.00", "1.50"],
        ]
    );
    let drawn = chart(&rows, &references, "speed").unwrap().unwrap();
    assert!(drawn.csv.contains("PyTorch · Training,ls,1024,1.5\n"), "{}", drawn.csv);
}

#[test]
fn the_chart_has_a_panel_per_pass_and_batch() {
    let row = |pass, batch, seconds| Row {
        pass: Some(pass),
        len: Some(512),
        batch: Some(batch),
        ..Row::new("speed", "full").with("step_time", "s", Some(seconds))
    };
    let csv = "model,len,batch,mode,ms\nfull,512,1,infer,10\nfull,512,1,infer,30\nfull,512,1,train,60\n\
                   full,512,8,train,80\nfull,512,16,train,\n";
    let [infer, train] = [Pass::Infer, Pass::Train];
    let references = parse(csv).unwrap();
    let mut rows = vec![row(infer, 1, 0.01), row(train, 1, 0.03), row(train, 16, 0.5)];
    let drawn = chart(&rows, &references, "speed").unwrap().unwrap();
    assert_eq!(drawn.name, "speed-reference");
    assert_eq!(drawn.csv, "panel,model,len,ratio\nInference,full,512,2\nTraining,full,512,2\n");
    rows.push(row(train, 8, 0.16));
    let drawn = chart(&rows, &references, "speed").unwrap().unwrap();
    assert!(drawn.csv.ends_with("Training · batch 8,full,512,0.5\n"), "{}", drawn.csv);
    assert!(drawn.svg.contains("geometric mean 1.26, least 0.50"), "{}", drawn.svg);
    assert!(chart(&rows, &[], "speed").unwrap().is_none());
}
