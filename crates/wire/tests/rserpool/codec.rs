//! Messages of both protocols behind one interface.

use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{DecodeError, EncodeError, ParsedMessage, asap, enrp};

#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    Asap(asap::Message),
    Enrp(enrp::Message),
}

impl Message {
    pub fn parse(ppid: u32, bytes: &Bytes) -> Result<ParsedMessage<Message>, DecodeError> {
        fn wrap<M>(parsed: ParsedMessage<M>, wrapper: fn(M) -> Message) -> ParsedMessage<Message> {
            ParsedMessage {
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
