//! An indexed job for kubectl.

use anyhow::Result;
use serde_json::{Value, json};

use super::{Job, WARNING};
use crate::term::{FAILED, USAGE};

/// Name of the container of a task.
const CONTAINER: &str = "effattn";
/// How often a task that was killed or whose node went away is started again.
const RETRIES: u64 = 6;

/// What is done where the program ended by itself and did not succeed: a cell failed, or the command is wrong. Another start
/// would end alike.
fn at_own_end(action: &str) -> Value {
    let codes = json!({ "containerName": CONTAINER, "operator": "In", "values": [FAILED, USAGE] });
    json!({ "rules": [{ "action": action, "onExitCodes": codes }] })
}

impl Job<'_> {
    pub(super) fn kubernetes(&self) -> Result<Vec<(&'static str, String)>> {
        let count = self.args.shards;
        let name = format!("effattn-{}", self.name.to_lowercase().replace(['_', '.', '='], "-"));
        let words: Vec<&str> = ["effattn"]
            .into_iter()
            .chain(self.words.iter().map(String::as_str))
            .chain(["--shard", "auto"])
            .collect();
        let environment = json!([{ "name": "COMPLETIONS", "value": count.to_string() }]);
        let mut template = self.pod(json!(words), environment)?;
        template["spec"]["activeDeadlineSeconds"] = (60 * self.minutes()).into();
        let array = json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": { "name": name },
            "spec": {
                "completions": count,
                "parallelism": count,
                "completionMode": "Indexed",
                "backoffLimitPerIndex": RETRIES,
                "maxFailedIndexes": count,
                "podFailurePolicy": at_own_end("FailIndex"),
                "template": template,
            },
        });
        let merge = json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": { "name": format!("{name}-merge") },
            "spec": {
                "podFailurePolicy": at_own_end("FailJob"),
                "template": self.pod(json!(["sh", "-c", self.merge_line()]), json!([]))?,
            },
        });
        let text = |job: &Value| Ok::<_, serde_json::Error>(serde_json::to_string_pretty(job)? + "\n");
        let submit = self.kubernetes_script(&name);
        Ok(vec![("array.json", text(&array)?), ("merge.json", text(&merge)?), ("submit.sh", submit)])
    }

    /// The template of a pod that runs `command`.
    fn pod(&self, command: Value, environment: Value) -> Result<Value> {
        let (image, claim) = (self.needs("image", "registry/effattn:1")?, self.needs("claim", "results")?);
        let mut limits = json!({ "cpu": self.cpus.to_string(), "memory": format!("{}Mi", self.mebibytes()) });
        if self.args.gpus > 0 {
            limits["nvidia.com/gpu"] = self.args.gpus.to_string().into();
        }
        Ok(json!({ "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": WARNING,
            "volumes": [{ "name": "work", "persistentVolumeClaim": { "claimName": claim } }],
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "workingDir": "/runs",
                "command": command,
                "env": environment,
                "resources": { "limits": limits, "requests": limits },
                "volumeMounts": [{ "name": "work", "mountPath": "/runs" }],
            }],
        }}))
    }

    /// Starts the array called `name`, waits for its end, and merges what there is. kubectl itself waits for one of both ends
    /// only.
    fn kubernetes_script(&self, name: &str) -> String {
        let folder = self.folder.display();
        format!(
            "#!/bin/sh
# Written by effattn submit.
set -e
kubectl apply -f '{folder}/array.json'
# the job is complete, or failed where a task did; a server that does not answer is asked again for five minutes
silent=0
while :; do
    if ended=$(kubectl get job/{name} -o jsonpath='{{.status.conditions[?(@.status==\"True\")].type}}'); then
        silent=0
    else
        ended= silent=$((silent + 1))
        [ $silent -lt 30 ] || exit 1
    fi
    case \" $ended \" in *' Complete '* | *' Failed '*) break ;; esac
    sleep 10
done
kubectl apply -f '{folder}/merge.json'
"
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::submit::{Args, check_options};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(options: &str) -> Args {
        let line = format!("submit --scheduler kubernetes --shards 3 {options} speed");
        Cli::try_parse_from(line.split_whitespace()).unwrap().args
    }

    #[test]
    fn a_task_that_fails_ends_no_other_and_what_there_is_is_merged() {
        let args = args("--option image=own:1 --option claim=disk");
        let job = Job {
            args: &args,
            name: "a_suite".to_owned(),
            words: vec!["speed".to_owned()],
            cpus: 2,
            seconds: 7200.0,
            bytes: 1 << 30,
            shards: "results".into(),
            folder: "jobs".into(),
            program: "effattn".into(),
            here: "/".into(),
        };
        let files = job.kubernetes().unwrap();
        let spec = |file: usize| serde_json::from_str::<Value>(&files[file].1).unwrap()["spec"].take();
        let (array, merge) = (spec(0), spec(1));
        let limits =
            ["backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"].map(|key| array[key].as_u64());
        assert_eq!(limits, [None, Some(6), Some(3)]);
        for (spec, action) in [(&array, "FailIndex"), (&merge, "FailJob")] {
            let rule = &spec["podFailurePolicy"]["rules"][0];
            assert_eq!((&rule["action"], &rule["onExitCodes"]["values"]), (&json!(action), &json!([1, 2])));
        }
        let pod = &array["template"]["spec"];
        assert_eq!((&pod["activeDeadlineSeconds"], &pod["restartPolicy"]), (&json!(7200), &json!("Never")));
        let submit = &files[2].1;
        assert!(submit.contains("' Complete '* | *' Failed '*") && submit.contains("job/effattn-a-suite"));
    }

    #[test]
    fn an_option_that_has_no_place_is_refused() {
        check_options(&args("--option image=own:1 --option claim=disk")).unwrap();
        let said = check_options(&args("--option imgae=own:1")).unwrap_err().to_string();
        assert!(said.contains("did you mean image?") && said.contains("known: image, claim"), "{said}");
    }
}
