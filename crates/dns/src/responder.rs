//! Queries as bytes, and their answers.

use std::net::IpAddr;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, Metadata, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, RecordType};

use crate::published_names::{NameOwner, PublishedName};
use crate::response_limit::{Admission, ResponseLimit};
use crate::selection::Random;
use crate::zone::{Lookup, Zone, ZoneSettings};

/// Maximum length of an answer by UDP in bytes, so that no fragments are needed (DNS flag day 2020).
pub const UDP_PAYLOAD_MAX: u16 = 1_232;
/// Maximum length of an answer by UDP to a client without EDNS, in bytes (RFC 1035 section 4.2.1).
const UDP_PAYLOAD_WITHOUT_EDNS: u16 = 512;
/// Length of the header in bytes.
const HEADER_BYTES: usize = 12;
/// Bit of the header's third byte that marks an answer.
const RESPONSE_FLAG: u8 = 0x80;

/// The transport of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryTransport {
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
}

/// The result of a query, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Records were found.
    Answered,
    /// The name has no records of the type.
    NoData,
    /// The name does not exist.
    NoSuchName,
    /// No address of the name serves, or this node does not know the group.
    Unavailable,
    /// The question is outside the zone, or asks for a transfer.
    Refused,
    /// The query is malformed, or asks for an operation or version that does not exist.
    Invalid,
    /// The client's network has had its share of answers: the answer is truncated.
    Limited,
}

impl Outcome {
    /// Returns the name for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Answered => "answered",
            Outcome::NoData => "no_data",
            Outcome::NoSuchName => "no_such_name",
            Outcome::Unavailable => "unavailable",
            Outcome::Refused => "refused",
            Outcome::Invalid => "invalid",
            Outcome::Limited => "limited",
        }
    }
}

/// Response to a DNS query, and the result for metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The message; none if the client gets no answer.
    pub bytes: Option<Vec<u8>>,
    /// Result of the query, for metrics.
    pub outcome: Outcome,
    /// The published name that the question is about; none for other names.
    pub name: Option<NameOwner>,
}

/// Answers DNS queries about one zone, within the limit on responses.
#[derive(Debug)]
pub struct Responder {
    zone: Zone,
    /// False before the names are known.
    has_names: bool,
    limit: ResponseLimit,
    random: Random,
}

impl Responder {
    /// Returns a responder that does not know the names of the zone yet.
    pub fn new(settings: ZoneSettings, limit: ResponseLimit, random: Random) -> Responder {
        Responder {
            zone: Zone::new(settings, 0, Vec::new()),
            has_names: false,
            limit,
            random,
        }
    }

    /// Replaces all names. The serial number (RFC 1982) grows with each change.
    pub fn set_names(&mut self, serial: u32, names: Vec<PublishedName>) {
        self.zone.set_names(serial, names);
        self.has_names = true;
    }

    /// Handles a query. `now` is the time since any fixed point. Returns nothing for a message that is no query: an
    /// answer to an answer could go back and forth for ever.
    pub fn handle_query(
        &mut self,
        now: Duration,
        client: IpAddr,
        transport: QueryTransport,
        query: &[u8],
    ) -> Option<Response> {
        let header: &[u8; HEADER_BYTES] = query.first_chunk()?;
        if header[2] & RESPONSE_FLAG != 0 {
            return None;
        }
        let admission = match transport {
            QueryTransport::Udp => self.limit.admit(now, client),
            QueryTransport::Tcp => Admission::Answer,
        };
        if admission == Admission::Drop {
            return Some(Response {
                bytes: None,
                outcome: Outcome::Limited,
                name: None,
            });
        }
        let request = read_request(header, query);
        let payload_max = match (transport, &request) {
            (QueryTransport::Tcp, _) => u16::MAX,
            (QueryTransport::Udp, Ok(request)) => request.edns.as_ref().map_or(
                UDP_PAYLOAD_WITHOUT_EDNS,
                // "Values lower than 512 MUST be treated as equal to 512" (RFC 6891 section 6.2.3).
                |edns| {
                    edns.max_payload()
                        .clamp(UDP_PAYLOAD_WITHOUT_EDNS, UDP_PAYLOAD_MAX)
                },
            ),
            (QueryTransport::Udp, Err(_)) => UDP_PAYLOAD_WITHOUT_EDNS,
        };
        let (message, outcome, name) = match request {
            Ok(request) => self.answer(&request),
            Err(error) => (*error, Outcome::Invalid, None),
        };
        Some(match admission {
            Admission::Answer => Response {
                bytes: encode_within(message, usize::from(payload_max)),
                outcome,
                name,
            },
            Admission::Truncate | Admission::Drop => Response {
                bytes: message.truncate().to_vec().ok(),
                outcome: Outcome::Limited,
                name: None,
            },
        })
    }

    fn answer(&mut self, request: &Message) -> (Message, Outcome, Option<NameOwner>) {
        let mut message = response_to(request);
        let fail = |mut message: Message, code, outcome| {
            message.metadata.response_code = code;
            (message, outcome, None)
        };
        if request.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
            return fail(message, ResponseCode::BADVERS, Outcome::Invalid);
        }
        let [question] = &request.queries[..] else {
            return fail(message, ResponseCode::FormErr, Outcome::Invalid);
        };
        let is_transfer = matches!(question.query_type(), RecordType::AXFR | RecordType::IXFR);
        if question.query_class() != DNSClass::IN || is_transfer {
            return fail(message, ResponseCode::Refused, Outcome::Refused);
        }
        let looked_up = self
            .zone
            .look_up(question.name(), question.query_type(), &mut self.random);
        let (lookup, name) = (looked_up.0, looked_up.1.cloned());
        let is_inside = lookup != Lookup::OutsideZone;
        let is_known = self.has_names || matches!(lookup, Lookup::Found { .. });
        let outcome = match lookup {
            Lookup::OutsideZone => Outcome::Refused,
            _ if !is_known => Outcome::Unavailable,
            Lookup::Unavailable => Outcome::Unavailable,
            Lookup::NoSuchName => Outcome::NoSuchName,
            Lookup::NoData => Outcome::NoData,
            Lookup::Found {
                answers,
                additionals,
            } => {
                message.answers = answers;
                message.additionals = additionals;
                Outcome::Answered
            }
        };
        message.metadata.response_code = match outcome {
            Outcome::Refused => ResponseCode::Refused,
            // A resolver asks another name server, which may know better, and keeps no negative answer.
            Outcome::Unavailable => ResponseCode::ServFail,
            Outcome::NoSuchName => ResponseCode::NXDomain,
            _ => ResponseCode::NoError,
        };
        message.metadata.authoritative = is_inside && outcome != Outcome::Unavailable;
        if matches!(outcome, Outcome::NoData | Outcome::NoSuchName) {
            // Resolvers keep a negative answer as long as the SOA record says (RFC 2308 section 3).
            message.authorities = vec![self.zone.soa()];
        }
        (message, outcome, name)
    }
}

/// Reads a query, or returns the answer to a query that cannot be read.
fn read_request(header: &[u8; HEADER_BYTES], query: &[u8]) -> Result<Message, Box<Message>> {
    let id = u16::from_be_bytes([header[0], header[1]]);
    let op_code = OpCode::from_u8((header[2] >> 3) & 0xf);
    let questions = u16::from_be_bytes([header[4], header[5]]);
    let refuse = |code| Box::new(Message::error_msg(id, op_code, code));
    if op_code != OpCode::Query {
        return Err(refuse(ResponseCode::NotImp));
    }
    // Counted before the parser reserves memory for the questions.
    if questions != 1 {
        return Err(refuse(ResponseCode::FormErr));
    }
    Message::from_vec(query).map_err(|_| refuse(ResponseCode::FormErr))
}

/// Returns an answer without records.
fn response_to(request: &Message) -> Message {
    let mut message = Message::response(request.id, request.op_code);
    message.metadata = Metadata::response_from_request(&request.metadata);
    message.add_queries(request.queries.iter().cloned());
    if request.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_PAYLOAD_MAX);
        message.set_edns(edns);
    }
    message
}

/// Encodes an answer. One that is too long has no additional records, and if that is not enough, no records and the mark
/// of a truncated message, so that the client asks by TCP.
fn encode_within(mut message: Message, bytes_max: usize) -> Option<Vec<u8>> {
    let fits = |message: &Message| {
        message
            .to_vec()
            .ok()
            .filter(|bytes| bytes.len() <= bytes_max)
    };
    if let Some(bytes) = fits(&message) {
        return Some(bytes);
    }
    message.additionals.clear();
    fits(&message).or_else(|| message.truncate().to_vec().ok())
}
