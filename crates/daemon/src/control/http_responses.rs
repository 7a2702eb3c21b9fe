//! Answers of the control API, shared by all daemons that serve it.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use holdfast_api::control::ErrorBody;
use serde::Serialize;

/// A negative answer.
pub struct ErrorResponse(pub StatusCode, pub ErrorBody);

/// Builds the response from another task's answer. A refusal has the status `refused`; no answer means that the task
/// has ended.
pub fn response<T: Serialize>(
    answer: Option<Result<T, ErrorBody>>,
    refused: StatusCode,
) -> Response {
    match answer {
        Some(Ok(answer)) => Json(answer).into_response(),
        Some(Err(body)) => ErrorResponse(refused, body).into_response(),
        None => ErrorResponse(
            StatusCode::SERVICE_UNAVAILABLE,
            ErrorBody {
                error: "the daemon is stopping".to_owned(),
                what_to_do: "ask again when it has been started".to_owned(),
            },
        )
        .into_response(),
    }
}

/// Answers a request for an unknown path.
pub async fn not_found() -> ErrorResponse {
    let error = "there is no such path".to_owned();
    ErrorResponse(StatusCode::NOT_FOUND, error_body(error))
}

/// Answers a request with a method that the path does not have.
pub async fn method_not_allowed() -> ErrorResponse {
    let error = "the path has no such method".to_owned();
    ErrorResponse(StatusCode::METHOD_NOT_ALLOWED, error_body(error))
}

/// Answers a malformed request.
pub fn bad_request(error: String) -> ErrorResponse {
    ErrorResponse(StatusCode::BAD_REQUEST, error_body(error))
}

/// Returns the body of an error that refers to the API description.
pub fn error_body(error: String) -> ErrorBody {
    ErrorBody {
        error,
        what_to_do: "GET /openapi.json describes every request".to_owned(),
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}
