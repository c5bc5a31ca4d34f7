//! A program's answers to golden files: it is given the inputs and never sees the expected outputs.

use serde_json::Value;

use super::{CheckError, FileVerdict, Golden, mechanism};
use crate::program::abilities::Abilities;
use crate::program::description::Description;
use crate::program::wire::{Message, Tensors};
use crate::program::{Answer, Conditions, Program};
use crate::run::outcome::CellFailure;
use crate::run::{CancelToken, RunError};
use candle_core::{DType, Device};
use effattn_record::config::settings::{DeviceName, DtypeName};
use effattn_record::{Outcome, Pass};

/// So many files in a row that end a program end its check.
const PATIENCE: usize = 3;
/// Tolerance of bf16 and TF32 as a share of the largest number of a tensor. bf16 keeps 8 bits, and a result is behind
/// several products and their sums: 16 times its rounding error.
const COARSE: f64 = 16.0 / 256.0;
/// Tensors whose largest number is below this share of the file's are held to that: a gradient that is 0 has the rounding
/// errors of what it is a sum of.
const SMALL: f64 = 1.0 / 16.0;

/// How programs are checked.
pub struct ProgramSettings {
    /// CPU threads.
    pub threads: usize,
    /// Number format.
    pub dtype: DtypeName,
    /// Device.
    pub device: DeviceName,
    /// Most resident bytes.
    pub resident_limit: u64,
    /// Set by Ctrl-C.
    pub stop: CancelToken,
}

/// A program under check. It is started again where it ended.
pub struct ProgramCheck<'a> {
    description: &'a Description,
    settings: &'a ProgramSettings,
    program: Option<Program>,
    /// Number format that it is asked for.
    dtype: DtypeName,
    /// What it can do.
    pub abilities: Abilities,
    /// What it says to be.
    pub version: String,
    ended_in_a_row: usize,
}

impl<'a> ProgramCheck<'a> {
    /// Starts a program and asks what it can do.
    pub fn start(
        description: &'a Description,
        settings: &'a ProgramSettings,
    ) -> Result<Result<Self, CellFailure>, RunError> {
        let (version, abilities) = Default::default();
        let (program, dtype, ended_in_a_row) = (None, settings.dtype, 0);
        let mut check = Self { description, settings, program, dtype, abilities, version, ended_in_a_row };
        let mut program = match check.restart()? {
            Ok(program) => program,
            Err(failure) => return Ok(Err(failure)),
        };
        match Abilities::of(&mut program, description, &check.conditions())? {
            Ok(abilities) => check.abilities = abilities,
            Err(failure) => return Ok(Err(failure)),
        }
        check.version.clone_from(&program.version);
        check.program = Some(program);
        Ok(Ok(check))
    }

    /// Asks for f32 where it does that: what it proves holds of the same code in fewer bits, and its tolerances are the files'.
    pub fn prefer_f32(&mut self) {
        let f32 = DtypeName::F32;
        if self.abilities.dtypes.contains(&f32.to_string()) {
            self.dtype = f32;
        }
    }

    fn restart(&self) -> Result<Result<Program, CellFailure>, RunError> {
        Program::start(self.description, self.settings.threads, &self.conditions())
    }

    fn conditions(&self) -> Conditions<'a> {
        Conditions { time: None, resident_limit: self.settings.resident_limit, stop: &self.settings.stop }
    }

    /// Puts one golden file of a mechanism to the program.
    pub fn check(&mut self, golden: &Golden) -> Result<Result<FileVerdict, CheckError>, RunError> {
        let name = golden.meta("mechanism");
        let causal = golden.meta("causal") == "true";
        let unanswered =
            |reason: String| Ok(Err(CheckError::NotAnswered { file: golden.file.clone(), reason }));
        let (dtype, device) = (self.dtype.to_string(), self.settings.device.to_string());
        if let Some(reason) = self.abilities.elsewhere(&dtype, &device) {
            return unanswered(reason);
        }
        let trains = match self.abilities.ability(name, &golden.config, causal) {
            Ok(ability) => ability.passes.contains(&Pass::Train),
            Err(reason) => return unanswered(reason),
        };
        if self.ended_in_a_row >= PATIENCE {
            return unanswered(format!(
                "{PATIENCE} files before it ended the program; it was not asked again"
            ));
        }
        let request = match self.request(golden, trains) {
            Ok(request) => request,
            Err(error) => return Ok(Err(golden.refused(error))),
        };
        match self.ask(request)? {
            Ok(answer) => {
                self.ended_in_a_row = 0;
                Ok(verdict(golden, &answer, trains, self.dtype))
            }
            Err(failure) => {
                let over = self.program.as_ref().is_none_or(Program::is_over);
                self.ended_in_a_row = if over { self.ended_in_a_row + 1 } else { 0 };
                match failure.outcome {
                    Outcome::Unsupported => unanswered(failure.reason),
                    outcome => {
                        let file = golden.file.clone();
                        Ok(Err(CheckError::Program { file, outcome, reason: failure.reason }))
                    }
                }
            }
        }
    }

    fn ask(&mut self, request: Message) -> Result<Result<Answer, CellFailure>, RunError> {
        if self.program.as_ref().is_none_or(Program::is_over) {
            self.program = None;
            match self.restart()? {
                Ok(program) => self.program = Some(program),
                Err(failure) => return Ok(Err(failure)),
            }
        }
        let conditions = self.conditions();
        match &mut self.program {
            Some(program) => program.ask(request, &conditions),
            None => Err(RunError::Internal("a program that was just started is gone".to_owned())),
        }
    }

    /// Everything of `golden` but what is compared.
    fn request(&self, golden: &Golden, gradients: bool) -> candle_core::Result<Message> {
        let compared = golden.compared();
        let given = golden.tensors.iter().filter(|(name, _)| !compared.contains(name));
        let given: Tensors = given.map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        let outputs: Vec<String> = compared.into_iter().filter(|name| !is_gradient(name)).collect();
        Message::request("evaluate")
            .with("case", golden.stem.as_str())
            .with("mechanism", self.description.theirs(golden.meta("mechanism")))
            .with("knobs", Value::Object(golden.config.clone()))
            .with("causal", golden.meta("causal") == "true")
            .with("dtype", self.dtype.to_string())
            .with("device", self.settings.device.to_string())
            .with("outputs", outputs)
            .with("leaves", if gradients { golden.leaves.clone() } else { Vec::new() })
            .with_tensors(&given)
    }

    /// Ends the program.
    pub fn finish(self) {
        if let Some(program) = self.program {
            program.finish();
        }
    }
}

fn is_gradient(name: &str) -> bool {
    name.starts_with("grad_")
}

/// Whether `golden` is about a mechanism alone: whole models, images and convolutions are not put to programs.
pub fn is_asked(golden: &Golden) -> bool {
    golden.meta("level").is_empty()
        && golden.meta("family") != "vision"
        && golden.meta("mechanism") != "shortconv"
}

fn verdict(
    golden: &Golden,
    answer: &Answer,
    gradients: bool,
    dtype: DtypeName,
) -> Result<FileVerdict, CheckError> {
    let share = match dtype {
        DtypeName::F32 => None,
        DtypeName::Bf16 | DtypeName::Tf32 => Some(COARSE),
    };
    let compared: Vec<String> =
        golden.compared().into_iter().filter(|name| gradients || !is_gradient(name)).collect();
    let mut least = 0.0;
    for name in &compared {
        least = f64::max(least, SMALL * golden.largest(name)?);
    }
    let keep = mechanism::kept_rows(golden, &Device::Cpu)?;
    let mut verdict = golden.verdict();
    for name in &compared {
        let Some(got) = answer.tensors.get(name) else {
            verdict.complain(format!("{name} is missing in its answer"));
            continue;
        };
        if got.dtype() != DType::F32 {
            verdict.complain(format!("{name} is {}; answers are f32", got.dtype().as_str()));
            continue;
        }
        let keep = keep.as_deref().filter(|_| name == "out");
        match share {
            None => golden.compare(&mut verdict, name, got, keep)?,
            Some(share) => {
                let atol = share * golden.largest(name)?.max(least);
                golden.compare_within(&mut verdict, name, (got, atol), keep)?;
            }
        }
    }
    Ok(verdict)
}
