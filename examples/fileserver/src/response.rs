//! Determines from a request's head the data to send or to receive.

use std::io;
use std::path::PathBuf;

use crate::Site;
use crate::head::{self, Head};
use crate::source::{self, Source};
use crate::state::{State, Work};
use crate::synthetic;
use crate::upload::{Destination, Framing, Upload};

/// Queues a short answer.
pub fn queue_short(state: &mut State, status: &str, text: &str) {
    let length = text.len();
    queue_head(state, status, length as u64, "content-type: text/plain\r\n");
    state.output.extend(text.bytes());
    state.work = Work::Idle;
}

/// Queues a short answer and ends the connection, because the start of the client's next request is unknown.
pub fn queue_last(state: &mut State, status: &str, text: &str) {
    state.close = true;
    queue_short(state, status, text);
}

fn queue_head(state: &mut State, status: &str, length: u64, more: &str) {
    let connection = if state.close {
        "connection: close\r\n"
    } else {
        ""
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\naccept-ranges: bytes\r\n{more}{connection}\r\n"
    );
    state.output.extend(head.bytes());
}

/// Starts to answer a request.
pub async fn start(state: &mut State, request: Head, site: &Site, unique: &str) {
    state.close = request.close;
    match request.method.as_str() {
        "GET" | "HEAD" => {
            // A body is not read here, so the start of the next request is unknown.
            state.close |=
                request.chunked || request.content_length.is_some_and(|length| length > 0);
            start_download(state, &request, site).await;
        }
        "PUT" | "POST" => start_upload(state, &request, site, unique),
        _ => queue_last(state, "405 Method Not Allowed", "GET, HEAD, PUT, POST\n"),
    }
    if request.method == "HEAD" {
        // Send only the head, with the length that the body would have.
        if let Some(end) = state
            .output
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
        {
            state.output.truncate(end + 4);
        }
        state.work = Work::Idle;
    }
}

async fn start_download(state: &mut State, request: &Head, site: &Site) {
    let (source, size) = match find_resource(&request.path, site).await {
        Ok(Resource::Source(source, size)) => (source, size),
        Ok(Resource::Text(text)) => return queue_short(state, "200 OK", &text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return queue_short(state, "404 Not Found", "there is no such file\n");
        }
        Err(error) => {
            return queue_short(state, "500 Internal Server Error", &format!("{error}\n"));
        }
    };
    match head::range(request.range.as_deref(), size) {
        Ok(None) => {
            queue_head(state, "200 OK", size, "");
            state.work = Work::Sending {
                source,
                at: 0,
                end: size,
            };
        }
        Ok(Some((first, end))) => {
            let range = format!("content-range: bytes {first}-{}/{size}\r\n", end - 1);
            queue_head(state, "206 Partial Content", end - first, &range);
            state.work = Work::Sending {
                source,
                at: first,
                end,
            };
        }
        Err(()) => queue_head(
            state,
            "416 Range Not Satisfiable",
            0,
            &format!("content-range: bytes */{size}\r\n"),
        ),
    }
}

enum Resource {
    Source(Source, u64),
    Text(String),
}

async fn find_resource(path: &str, site: &Site) -> io::Result<Resource> {
    if let Some(size) = path.strip_prefix("/synthetic/") {
        let (size, digest) = match size.strip_suffix(".sha256") {
            Some(size) => (size, true),
            None => (size, false),
        };
        let size = size
            .parse()
            .ok()
            .filter(|size| *size <= synthetic::SIZE_MAX);
        let size: u64 = size.ok_or(io::ErrorKind::NotFound)?;
        if !digest {
            return Ok(Resource::Source(Source::Synthetic, size));
        }
        let digest = tokio::task::spawn_blocking(move || synthetic::sha256(size))
            .await
            .map_err(io::Error::other)?;
        return Ok(Resource::Text(format!("{digest}\n")));
    }
    let (Some(root), Some(name)) = (&site.root, source::relative_path(path)) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let metadata = std::fs::metadata(root.join(&name))?;
    if !metadata.is_file() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(Resource::Source(Source::File(name), metadata.len()))
}

fn start_upload(state: &mut State, request: &Head, site: &Site, unique: &str) {
    let framing = match (request.chunked, request.content_length) {
        (true, _) => Framing::Chunked(Default::default()),
        (false, Some(length)) => Framing::Length(length),
        (false, None) => {
            return queue_last(
                state,
                "411 Length Required",
                "Content-Length or chunked transfer coding is required\n",
            );
        }
    };
    let destination = match (
        request.path.as_str(),
        &site.root,
        source::relative_path(&request.path),
    ) {
        ("/digest", ..) => None,
        (_, Some(_), Some(name)) => Some(Destination {
            partial: partial_path(&name, unique),
            name,
        }),
        _ => {
            return queue_last(
                state,
                "404 Not Found",
                "upload to /digest, or to a file name if the server has --root\n",
            );
        }
    };
    let upload = Upload::new(framing, destination);
    // Open the file once before telling the client to continue: a missing directory is reported at once.
    match upload.clone().open(site.root.as_deref()) {
        Err(error) => {
            return queue_last(
                state,
                "409 Conflict",
                &format!("cannot write there: {error}\n"),
            );
        }
        Ok(_) if request.expects_continue => state.output.extend(b"HTTP/1.1 100 Continue\r\n\r\n"),
        Ok(_) => {}
    }
    state.work = Work::Receiving(upload);
}

/// Returns a path in the file's directory, with a name that no other connection uses.
fn partial_path(name: &std::path::Path, unique: &str) -> PathBuf {
    let file = name.file_name().unwrap_or_default().to_string_lossy();
    name.with_file_name(format!(".{file}.{unique}.partial"))
}
