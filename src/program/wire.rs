//! Messages between effattn and a program: a mark, two lengths, a JSON header, tensors as safetensors.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};

/// First bytes of every message: what a program prints by mistake does not begin so.
pub const MARK: &[u8; 8] = b"effattn1";
/// Version of the contract, sent with the first request.
pub const CONTRACT: u64 = 1;
/// Largest header and largest body that are read, in bytes.
const MOST_HEADER: u64 = 1 << 24;
const MOST_BODY: u64 = 1 << 32;

/// Named tensors of a message.
pub type Tensors = BTreeMap<String, Tensor>;

/// A request or an answer.
#[derive(Debug, Default)]
pub struct Message {
    /// What is asked or answered.
    pub header: Map<String, Value>,
    /// safetensors; empty where there are none.
    pub body: Vec<u8>,
}

impl Message {
    /// The request called `name`.
    pub fn request(name: &str) -> Self {
        Self { header: Map::from_iter([("request".to_owned(), name.into())]), body: Vec::new() }
    }

    /// The same message with one more entry of its header.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.header.insert(key.to_owned(), value.into());
        self
    }

    /// The same message with `tensors` (f32 and i64).
    pub fn with_tensors(self, tensors: &Tensors) -> candle_core::Result<Self> {
        let mut bytes = BTreeMap::new();
        for (name, tensor) in tensors {
            let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
            let (dtype, data) = match tensor.dtype() {
                DType::F32 => {
                    (Dtype::F32, flat.to_vec1::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect())
                }
                _ => {
                    let flat = flat.to_dtype(DType::I64)?.to_vec1::<i64>()?;
                    (Dtype::I64, flat.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
                }
            };
            bytes.insert(name, (dtype, tensor.dims().to_vec(), data));
        }
        let views = bytes.iter().map(|(name, (dtype, dims, data))| {
            TensorView::new(*dtype, dims.clone(), data).map(|view| (name.as_str(), view))
        });
        let wrap = candle_core::Error::wrap;
        let views = views.collect::<Result<Vec<_>, _>>().map_err(wrap)?;
        let body = safetensors::serialize(views, None).map_err(wrap)?;
        Ok(Self { body, ..self })
    }

    /// The tensors of its body; an error says what is wrong with it. Floats keep their type.
    pub fn tensors(&self) -> Result<Tensors, String> {
        if self.body.is_empty() {
            return Ok(Tensors::new());
        }
        let content = SafeTensors::deserialize(&self.body).map_err(|error| {
            format!("the {} bytes behind its header are not safetensors ({error})", self.body.len())
        })?;
        content
            .iter()
            .map(|(name, view)| {
                let dtype = DType::try_from(view.dtype());
                let tensor = dtype.and_then(|dtype| {
                    Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)
                });
                Ok((name.to_owned(), tensor.map_err(|error| format!("tensor {name}: {error}"))?))
            })
            .collect()
    }

    /// Writes it.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let header = serde_json::to_vec(&self.header)?;
        to.write_all(MARK)?;
        to.write_all(&(header.len() as u64).to_le_bytes())?;
        to.write_all(&(self.body.len() as u64).to_le_bytes())?;
        to.write_all(&header)?;
        to.write_all(&self.body)?;
        to.flush()
    }

    /// The next message; none at the end of the stream. The error says in words what came in its place.
    pub fn read(from: &mut impl Read) -> Result<Option<Self>, String> {
        let front = bytes(from, 8)?;
        if front.is_empty() {
            return Ok(None);
        }
        if front != MARK {
            return Err(format!(
                "its standard output begins with {:?} in the place of an answer; print to standard error instead",
                String::from_utf8_lossy(&front)
            ));
        }
        let mut length = |most: u64, what: &str| {
            let bytes: [u8; 8] = bytes(from, 8)?.try_into().map_err(|_| "its answer ended in the lengths")?;
            let length = u64::from_le_bytes(bytes);
            match length <= most {
                true => Ok(length),
                false => Err(format!(
                    "the {what} of its answer says to be {length} bytes long; at most {most} are read"
                )),
            }
        };
        let (header, body) = (length(MOST_HEADER, "header")?, length(MOST_BODY, "body")?);
        let text = exactly(from, header, "header")?;
        let header = serde_json::from_slice(&text)
            .map_err(|error| format!("the header of its answer is not a JSON object ({error})"))?;
        Ok(Some(Self { header, body: exactly(from, body, "body")? }))
    }
}

/// Up to `count` bytes, fewer at the end of the stream. Memory grows with what comes, not with what was announced.
fn bytes(from: &mut impl Read, count: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    from.take(count)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("its answer cannot be read ({error})"))?;
    Ok(bytes)
}

fn exactly(from: &mut impl Read, count: u64, what: &str) -> Result<Vec<u8>, String> {
    let bytes = bytes(from, count)?;
    match bytes.len() as u64 == count {
        true => Ok(bytes),
        false => Err(format!("the {what} of its answer ended after {} of {count} bytes", bytes.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(message: &Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        message.write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let x = Tensor::new(&[[1.5f32, -0.0], [f32::MIN_POSITIVE, 3e38]], &Device::Cpu).unwrap();
        let ids = Tensor::new(&[7u32, 9], &Device::Cpu).unwrap();
        let tensors = Tensors::from([("x".to_owned(), x), ("ids".to_owned(), ids)]);
        let message = Message::request("evaluate").with("causal", true).with_tensors(&tensors).unwrap();
        let two = [sent(&message), sent(&Message::request("end"))].concat();
        let stream = &mut two.as_slice();
        let first = Message::read(stream).unwrap().unwrap();
        assert_eq!((&first.header["request"], &first.header["causal"]), (&"evaluate".into(), &true.into()));
        let back = first.tensors().unwrap();
        assert_eq!(back["ids"].to_vec1::<i64>().unwrap(), [7, 9]);
        let bits = |t: &Tensor| {
            t.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(bits(&back["x"]), bits(&tensors["x"]));
        assert_eq!(Message::read(stream).unwrap().unwrap().header["request"], "end");
        assert!(Message::read(stream).unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_named() {
        let read = |bytes: &[u8]| Message::read(&mut &bytes[..]).unwrap_err();
        assert!(read(b"loss 0.25 at step 3\n").contains("begins with \"loss 0.2\""));
        let whole = sent(&Message { body: vec![0; 9], ..Message::request("end") });
        assert!(read(&whole[..12]).contains("ended in the lengths"));
        assert!(read(&whole[..30]).contains("the header of its answer ended after 6 of"));
        assert!(read(&whole[..whole.len() - 4]).contains("the body of its answer ended after 5 of 9 bytes"));
        let mut huge = whole.clone();
        huge[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read(&huge).contains("at most 4294967296 are read"));
        let odd = [&MARK[..], &2u64.to_le_bytes(), &0u64.to_le_bytes(), b"[]"].concat();
        assert!(read(&odd).contains("not a JSON object"));
        let wrong = Message { body: vec![1; 30], ..Message::default() };
        assert!(wrong.tensors().unwrap_err().contains("the 30 bytes behind its header are not safetensors"));
    }
}
