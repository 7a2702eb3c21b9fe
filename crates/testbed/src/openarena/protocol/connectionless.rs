//! Datagrams outside a connection: four bytes of ones and a text.

use super::adaptive_huffman;

const CONNECTIONLESS_MARK: [u8; 4] = [0xff; 4];

/// Message of a server outside a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerNotice {
    /// Number with which a client may connect.
    Challenge(i32),
    /// The client is connected.
    Connected,
    /// The connection has ended.
    Disconnect,
    /// Text for the user, mostly the reason for a refusal.
    Print(String),
    /// Settings of the server, and the players.
    Status(ServerStatus),
    /// Any other message.
    Other,
}

/// A server's answer to `getstatus`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerStatus {
    /// Names of settings and their values.
    pub settings: Vec<(String, String)>,
    /// Current players.
    pub players: Vec<PlayerStatus>,
}

/// One player in a [`ServerStatus`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlayerStatus {
    /// Points.
    pub score: i32,
    /// Round-trip time, milliseconds; 999 for a player that has not entered.
    pub ping_ms: i32,
    /// Name.
    pub name: String,
}

/// Reads a datagram; returns none if it belongs to a connection.
#[must_use]
pub fn parse(datagram: &[u8]) -> Option<ServerNotice> {
    let text = String::from_utf8_lossy(datagram.strip_prefix(&CONNECTIONLESS_MARK)?);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let mut words = first.split_ascii_whitespace();
    Some(match words.next().unwrap_or_default() {
        "challengeResponse" => words
            .next()
            .and_then(|number| number.parse().ok())
            .map_or(ServerNotice::Other, ServerNotice::Challenge),
        "connectResponse" => ServerNotice::Connected,
        "disconnect" => ServerNotice::Disconnect,
        "print" => ServerNotice::Print(rest.trim_end().to_owned()),
        "statusResponse" => ServerNotice::Status(parse_status(rest)),
        _ => ServerNotice::Other,
    })
}

fn parse_status(text: &str) -> ServerStatus {
    let mut lines = text.lines();
    let settings = parse_settings(lines.next().unwrap_or_default());
    let players = lines.filter_map(|line| {
        let (score, rest) = line.split_once(' ')?;
        let (ping, name) = rest.split_once(' ')?;
        Some(PlayerStatus {
            score: score.parse().ok()?,
            ping_ms: ping.parse().ok()?,
            name: name.trim_matches('"').to_owned(),
        })
    });
    ServerStatus {
        players: players.collect(),
        settings,
    }
}

/// Reads `\name\value\name\value`.
#[must_use]
pub fn parse_settings(text: &str) -> Vec<(String, String)> {
    let parts: Vec<&str> = text
        .strip_prefix('\\')
        .unwrap_or(text)
        .split('\\')
        .collect();
    let pairs = parts.chunks_exact(2);
    pairs
        .map(|pair| (pair[0].to_owned(), pair[1].to_owned()))
        .collect()
}

/// Returns a request for a challenge.
#[must_use]
pub fn challenge_request() -> Vec<u8> {
    text_datagram("getchallenge")
}

/// Returns a request for the status.
#[must_use]
pub fn status_request() -> Vec<u8> {
    text_datagram("getstatus")
}

/// Returns a request to be connected. Everything after the first word is compressed with an adaptive tree.
#[must_use]
pub fn connect(user: &[(&str, &str)]) -> Vec<u8> {
    let info: String = user
        .iter()
        .map(|(name, value)| format!("\\{name}\\{value}"))
        .collect();
    let mut datagram = text_datagram("connect ");
    datagram.extend(adaptive_huffman::compress(format!("\"{info}\"").as_bytes()));
    datagram
}

fn text_datagram(text: &str) -> Vec<u8> {
    [&CONNECTIONLESS_MARK, text.as_bytes()].concat()
}
