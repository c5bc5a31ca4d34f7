//! Jobs for schedulers.

use std::fs;

use super::{done, effattn, refused, stderr};

#[test]
fn an_option_of_a_scheduler_is_a_name_and_a_value() {
    let folder = tempfile::tempdir().unwrap();
    for (option, why) in
        [("--foo=1", "without dashes: foo=1"), ("a b=c", "a key is letters"), ("=c", "KEY=VALUE")]
    {
        let mut command = effattn(folder.path(), "submit --option");
        command.args([option, "speed", "--len", "32"]);
        let output = command.output().unwrap();
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains(why),
            "{option}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn jobs_are_written_for_every_scheduler() {
    let folder = tempfile::tempdir().unwrap();
    let command = "speed --preset ls-lra --model full --len 32 --max-time 20ms --threads 1";
    let written = |scheduler: &str, options: &str| {
        let line =
            format!("submit --scheduler {scheduler} {options} --shards 2 --jobs-dir {scheduler} {command}");
        done(folder.path(), &line);
        let file =
            |name: &str| fs::read_to_string(folder.path().join(scheduler).join("speed").join(name)).unwrap();
        let submit = file("submit.sh");
        let jobs = ["array", "merge"].map(|job| {
            assert!(submit.contains(job), "{submit}");
            file(&format!("{job}.{}", if scheduler == "slurm" { "sbatch" } else { "json" }))
        });
        (jobs, submit)
    };
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let ([array, merge], _) = written("kubernetes", "--option image=own:1 --option claim=disk");
    let (array, merge) = (json(&array), json(&merge));
    assert_eq!((&array["kind"], &array["spec"]["completionMode"]), (&"Job".into(), &"Indexed".into()));
    assert_eq!((&array["spec"]["completions"], &array["spec"]["parallelism"]), (&2.into(), &2.into()));
    let container = &array["spec"]["template"]["spec"]["containers"][0];
    assert_eq!((&container["image"], &container["env"][0]["value"]), (&"own:1".into(), &"2".into()));
    let command = |job: &serde_json::Value| job["command"].as_array().unwrap().clone();
    assert!(command(container).ends_with(&["--shard".into(), "auto".into()]), "{container}");
    assert_eq!(command(&merge["spec"]["template"]["spec"]["containers"][0])[0], "sh", "{merge}");

    let ([array, merge], submit) = written("aws-batch", "--option queue=q --option definition=d");
    let (array, merge) = (json(&array), json(&merge));
    assert_eq!((&array["jobQueue"], &array["jobDefinition"]), (&"q".into(), &"d".into()));
    assert_eq!(array["arrayProperties"]["size"], 2);
    assert!(command(&array["containerOverrides"]).ends_with(&["--shard".into(), "auto".into()]), "{array}");
    assert!(merge["arrayProperties"].is_null() && submit.contains("--depends-on"), "{merge} {submit}");

    let ([array, _], submit) = written("slurm", "");
    assert!(array.contains("#SBATCH --array=1-2") && array.contains("--requeue"), "{array}");
    assert!(submit.contains("sbatch"), "{submit}");
    let said =
        refused(effattn(folder.path(), &format!("submit --scheduler kubernetes {}", "speed --len 32")));
    assert!(said.contains("image"), "{said}");
}
