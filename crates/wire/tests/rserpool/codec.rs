//! Messages of both protocols behind one interface.

use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{EncodeError, Error, Parsed, asap, enrp};

#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    Asap(asap::Message),
    Enrp(enrp::Message),
}

impl Message {
    pub fn parse(ppid: u32, bytes: &Bytes) -> Result<Parsed<Message>, Error> {
        fn wrap<M>(parsed: Parsed<M>, wrapper: fn(M) -> Message) -> Parsed<Message> {
            Parsed {
                message: wrapper(parsed.message),
                reports: parsed.reports,
            }
        }
        match ppid {
            asap::PPID => asap::Message::parse(bytes).map(|parsed| wrap(parsed, Message::Asap)),
            enrp::PPID => enrp::Message::parse(bytes).map(|parsed| wrap(parsed, Message::Enrp)),
            _ => panic!("unknown PPID {ppid}"),
        }
    }

    pub fn ppid(&self) -> u32 {
        match self {
            Message::Asap(_) => asap::PPID,
            Message::Enrp(_) => enrp::PPID,
        }
    }

    pub fn port(&self) -> u16 {
        match self {
            Message::Asap(_) => asap::PORT,
            Message::Enrp(_) => enrp::PORT,
        }
    }

    pub fn encode(&self) -> Result<Bytes, EncodeError> {
        let mut buffer = BytesMut::new();
        match self {
            Message::Asap(message) => message.encode(&mut buffer)?,
            Message::Enrp(message) => message.encode(&mut buffer)?,
        }
        Ok(buffer.freeze())
    }
}
