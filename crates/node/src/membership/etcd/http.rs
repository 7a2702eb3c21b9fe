//! One connection to an HTTP/1.1 server, for requests with JSON one after the other (RFC 9112). Everything that the server
//! sends is bounded in length and in time.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::config::EtcdEndpoint;

/// Maximum length of a response's head, and of the line before a chunk.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// A response: status code and body.
pub struct Response {
    pub status: u16,
    pub body: Vec<u8>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

/// A connection; after an error the caller drops it.
pub struct HttpConnection {
    stream: Stream,
    host: String,
    /// Received bytes that are not used yet.
    received: Vec<u8>,
    deadline: Instant,
}

impl HttpConnection {
    /// Connects to an endpoint, by TLS if its URL says so.
    ///
    /// # Errors
    /// No address of the endpoint accepts a connection before the deadline.
    pub fn open(
        endpoint: &EtcdEndpoint,
        tls: Option<&Arc<ClientConfig>>,
        deadline: Instant,
    ) -> io::Result<HttpConnection> {
        let addresses = (endpoint.host.as_str(), endpoint.port).to_socket_addrs()?;
        let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, time_left(deadline)?) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(HttpConnection {
                        stream: with_tls(stream, endpoint, tls)?,
                        host: endpoint.authority(),
                        received: Vec::new(),
                        deadline,
                    });
                }
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Sends a request with a JSON body, and reads the response, whose body is at most `body_bytes_max` long.
    ///
    /// # Errors
    /// The connection fails, the deadline passes, or the server does not speak HTTP/1.1.
    pub fn post(
        &mut self,
        path: &str,
        (body, token): (&[u8], Option<&str>),
        body_bytes_max: usize,
        deadline: Instant,
    ) -> io::Result<Response> {
        self.deadline = deadline;
        let authorization =
            token.map_or_else(String::new, |token| format!("Authorization: {token}\r\n"));
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{authorization}\r\n",
            self.host,
            body.len()
        );
        self.set_timeout()?;
        let request = [head.as_bytes(), body].concat();
        match &mut self.stream {
            Stream::Plain(stream) => stream.write_all(&request)?,
            Stream::Tls(stream) => {
                stream.write_all(&request)?;
                stream.flush()?;
            }
        }
        let head = self.read_until(b"\r\n\r\n")?;
        let head = Head::parse(&head).ok_or_else(|| malformed("the head of the response"))?;
        let body = match head.length {
            Length::Chunked => self.read_chunks(body_bytes_max)?,
            Length::Bytes(length) if length > body_bytes_max => {
                return Err(malformed("the length of the response"));
            }
            Length::Bytes(length) => self.read_exactly(length)?,
        };
        Ok(Response {
            status: head.status,
            body,
        })
    }

    fn read_chunks(&mut self, bytes_max: usize) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.read_until(b"\r\n")?;
            let line = std::str::from_utf8(&line).ok();
            let size = line.and_then(|line| line.split([';', '\r']).next());
            let size = size.and_then(|size| usize::from_str_radix(size.trim(), 16).ok());
            let size = size.filter(|size| *size <= bytes_max - body.len());
            let size = size.ok_or_else(|| malformed("the length of a chunk"))?;
            if size == 0 {
                // Trailers end with an empty line.
                while self.read_until(b"\r\n")?.len() > 2 {}
                return Ok(body);
            }
            body.extend_from_slice(&self.read_exactly(size)?);
            if self.read_exactly(2)? != b"\r\n" {
                return Err(malformed("the end of a chunk"));
            }
        }
    }

    /// Reads up to the end of a pattern, which is part of the result.
    fn read_until(&mut self, pattern: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            let mut windows = self.received.windows(pattern.len());
            if let Some(position) = windows.position(|window| window == pattern) {
                let rest = self.received.split_off(position + pattern.len());
                return Ok(std::mem::replace(&mut self.received, rest));
            }
            if self.received.len() > HEAD_BYTES_MAX {
                return Err(malformed("the length of a line"));
            }
            self.receive()?;
        }
    }

    fn read_exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.received.len() < length {
            self.receive()?;
        }
        let rest = self.received.split_off(length);
        Ok(std::mem::replace(&mut self.received, rest))
    }

    fn receive(&mut self) -> io::Result<()> {
        self.set_timeout()?;
        let mut bytes = [0; 8 << 10];
        let read = match &mut self.stream {
            Stream::Plain(stream) => stream.read(&mut bytes),
            Stream::Tls(stream) => stream.read(&mut bytes),
        };
        match read {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                self.received.extend_from_slice(&bytes[..length]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            Err(error) => Err(error),
        }
    }

    fn set_timeout(&self) -> io::Result<()> {
        let left = time_left(self.deadline)?;
        let stream = match &self.stream {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => &stream.sock,
        };
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))
    }
}

fn with_tls(
    stream: TcpStream,
    endpoint: &EtcdEndpoint,
    tls: Option<&Arc<ClientConfig>>,
) -> io::Result<Stream> {
    let Some(tls) = tls else {
        return Ok(Stream::Plain(stream));
    };
    let name = ServerName::try_from(endpoint.host.clone());
    let name = name.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let connection = ClientConnection::new(Arc::clone(tls), name).map_err(io::Error::other)?;
    Ok(Stream::Tls(Box::new(StreamOwned::new(connection, stream))))
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

fn malformed(what: &str) -> io::Error {
    let text = format!("{what} is not that of an HTTP/1.1 server");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[derive(Debug, PartialEq, Eq)]
enum Length {
    Bytes(usize),
    Chunked,
}

#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    length: Length,
}

impl Head {
    fn parse(bytes: &[u8]) -> Option<Head> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.split("\r\n");
        let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.get(..3)?;
        let status = status.parse().ok().filter(|status| *status >= 200)?;
        let mut length = Length::Bytes(0);
        for line in lines.filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':')?;
            let value = value.trim();
            if name.eq_ignore_ascii_case("transfer-encoding") {
                if !value.eq_ignore_ascii_case("chunked") {
                    return None;
                }
                length = Length::Chunked;
            }
            if name.eq_ignore_ascii_case("content-length") && length != Length::Chunked {
                length = Length::Bytes(value.parse().ok()?);
            }
        }
        Some(Head { status, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_gives_status_and_length() {
        let parsed =
            |text: &str| Head::parse(text.as_bytes()).map(|head| (head.status, head.length));
        assert_eq!(
            parsed("HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n"),
            Some((200, Length::Bytes(12)))
        );
        assert_eq!(
            parsed("HTTP/1.1 401 Unauthorized\r\nTransfer-Encoding: chunked\r\n\r\n"),
            Some((401, Length::Chunked))
        );
        for text in [
            "",
            "HTTP/2 200\r\n\r\n",
            "HTTP/1.1 100 Continue\r\n\r\n",
            "HTTP/1.1 20\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
